//! What is wrong with a VM, if anything is.

use ebb_api::{State, TopVm};

/// How urgently a VM needs somebody; the least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Trouble {
    /// Nothing is wrong.
    None,
    /// It is slower than it could be, or not all is known of it.
    Slow,
    /// Its guest waits.
    Waits,
}

/// Returns what is wrong with a VM, in words; empty: nothing, and there is nothing to be said.
pub fn of(vm: &TopVm) -> (Trouble, String) {
    let reason = vm.state_reason.as_deref().map(clean).unwrap_or_default();
    match (vm.state, vm.waits) {
        (State::NotRecovered, _) => (Trouble::Waits, format!("not recovered: {reason}")),
        (_, true) if reason.is_empty() => (Trouble::Waits, "waits for room".into()),
        (_, true) => (Trouble::Waits, format!("waits for room: {reason}")),
        (State::Recovering, _) => (Trouble::Slow, format!("being recovered: {reason}")),
        _ if !reason.is_empty() => (Trouble::Slow, reason),
        _ if vm.misses_memory => (Trouble::Slow, "misses memory: its limit is too low".into()),
        _ => (Trouble::None, remark(vm)),
    }
}

/// Returns what is worth knowing of a VM with which nothing is wrong.
fn remark(vm: &TopVm) -> String {
    let warnings = match vm.warnings {
        0 => None,
        1 => Some("1 warning: ebb status".to_owned()),
        many => Some(format!("{many} warnings: ebb status")),
    };
    let untrusted = vm.parts.and_then(|parts| match parts.free_bytes {
        None => Some("guest not trusted".to_owned()),
        Some(_) => None,
    });
    untrusted.into_iter().chain(warnings).collect::<Vec<_>>().join("; ")
}

/// Replaces what could change the terminal: a part of such text is a QEMU's own.
pub fn clean(text: &str) -> String {
    text.replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples::vm;

    #[test]
    fn who_waits_comes_before_who_is_slow() {
        let fine = vm("fine");
        let mut cases = [fine.clone(), fine.clone(), fine.clone(), fine.clone()];
        cases[0].misses_memory = true;
        (cases[1].waits, cases[1].state_reason) = (true, Some("the swap file is full".into()));
        cases[2].state = State::NotRecovered;
        cases[3].state_reason = Some("for 7 s its process has been busy\x1b[2J".into());
        let found = cases.each_ref().map(of);
        assert_eq!(found[0].0, Trouble::Slow);
        assert_eq!(found[1], (Trouble::Waits, "waits for room: the swap file is full".into()));
        assert_eq!(found[2].0, Trouble::Waits);
        assert_eq!(found[3], (Trouble::Slow, "for 7 s its process has been busy?[2J".into()));
        assert_eq!(of(&fine), (Trouble::None, String::new()));
    }
}
