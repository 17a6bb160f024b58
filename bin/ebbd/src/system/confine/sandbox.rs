//! A QEMU's own filter of system calls: whether it has one, and who sets it.

use std::path::Path;
use std::process::Output;
use std::sync::OnceLock;

use ebb_sys::confine::Identity;
use ebb_vm::launch;

pub(super) fn own_sandbox(qemu_args: &[String]) -> bool {
    qemu_args.iter().any(|word| word == "-sandbox" || word == "--sandbox")
}

/// Whether this QEMU can filter its system calls.
pub(super) fn has_sandbox(qemu: &Path, identity: &Identity) -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    let words = ["-sandbox", launch::SANDBOX, "-machine", "help"];
    remembered(&KNOWN, || clear(&launch::ask(qemu, Some(identity.clone()), &words).ok()?))
}

/// Asks until there is an answer. If something else is wrong with this QEMU, starting it gives a
/// better reason.
fn remembered(known: &OnceLock<bool>, ask: impl FnOnce() -> Option<bool>) -> bool {
    if let Some(&has) = known.get() {
        return has;
    }
    ask().is_none_or(|has| *known.get_or_init(|| has))
}

/// The answer of a QEMU; none: it failed for another reason.
fn clear(output: &Output) -> Option<bool> {
    match output.status.success() {
        true => Some(true),
        false => String::from_utf8_lossy(&output.stderr).contains("sandbox").then_some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_answer_of_a_qemu_is_remembered() {
        let answer = |script: &str| {
            clear(&std::process::Command::new("sh").args(["-c", script]).output().unwrap())
        };
        assert_eq!(answer("echo sandbox >&2"), Some(true));
        assert_eq!(answer("echo '-sandbox: no such option' >&2; exit 1"), Some(false));
        assert_eq!(answer("echo no memory >&2; exit 1"), None);
        assert_eq!(answer("kill -9 $$"), None);
        let known = OnceLock::new();
        assert!(remembered(&known, || None));
        assert!(!remembered(&known, || Some(false)));
        assert!(!remembered(&known, || Some(true)));
    }
}
