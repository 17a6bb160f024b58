//! Memory that was plugged in after the VM was attached: it is not served, and the operator is
//! told.

use std::time::Instant;

use ebb_units::Bytes;
use ebb_vm::layout::{self, Added};

use crate::vm::context::VmContext;

/// Asks QEMU for such memory, of any kind of device, and updates `known` and warns on a change.
/// Asks nothing after `end`.
pub fn look(cx: &mut VmContext, known: &mut Vec<Added>, end: Instant) {
    let Some(qmp) = cx.qmp.socket() else { return };
    match layout::added(qmp, cx.pager.ram(), end) {
        Ok(added) if added != *known => {
            warning(&added).inspect(|why| tracing::warn!("its memory devices: {why}"));
            *known = added;
        }
        Ok(_) => {}
        Err(error) => tracing::debug!("its memory devices: {error}"),
    }
}

/// Returns what the operator should know of such memory.
pub fn warning(added: &[Added]) -> Option<String> {
    let first = added.first()?;
    let bytes = added.iter().fold(0, |all: u64, device| all.saturating_add(device.bytes));
    let more = match added.len() {
        1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    Some(format!(
        "{} of memory was plugged in after Ebb began to manage the VM ({} at {:#x}{more}): Ebb \
         does not manage it, and no limit counts it; unplug it, or detach and attach the VM if it \
         is a shared memfd (memory-backend-memfd,share=on)",
        Bytes(bytes),
        first.name.escape_debug(),
        first.gpa.0
    ))
}

#[cfg(test)]
mod tests {
    use ebb_units::Gpa;

    use super::*;

    #[test]
    fn memory_that_came_later_is_reported_in_one_line() {
        let added = |name: &str, gpa| Added { name: name.into(), gpa: Gpa(gpa), bytes: 256 << 20 };
        assert_eq!(warning(&[]), None);
        let one = warning(&[added("dimm\n1", 4 << 30)]).unwrap();
        assert!(one.contains("256 MiB") && one.contains("at 0x100000000)"), "{one}");
        assert!(!one.contains('\n'), "{one}");
        let two = warning(&[added("a", 4 << 30), added("b", 5 << 30)]).unwrap();
        assert!(two.contains("512 MiB") && two.contains("and 1 more"), "{two}");
    }
}
