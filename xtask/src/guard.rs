//! Turns panics of the test bench into errors.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe, catch_unwind};

use anyhow::anyhow;

/// Stops panics from printing by themselves.
pub fn silence() {
    panic::set_hook(Box::new(|_| ()));
}

/// Runs `action`, and turns a panic into an error.
///
/// # Errors
/// As for `action`, or it panics.
pub fn guard<T>(action: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    catch_unwind(AssertUnwindSafe(action)).unwrap_or_else(|panic| Err(reason(panic.as_ref())))
}

/// Returns the first line of a panic's message. Of an `ebb` command that failed, only its own words
/// are left.
pub fn reason(panic: &(dyn Any + Send)) -> anyhow::Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
    let line = text.lines().next().unwrap_or_default();
    anyhow!("{}", line.split_once(": ebb: ").map_or(line, |(_, why)| why).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_one_line() {
        let text = "assertion `left == right` failed: run --name x: ebb: no\n  left: Some(1)";
        let error = |text: &str| guard::<()>(|| panic!("{text}")).unwrap_err().to_string();
        assert_eq!(error(text), "no");
        assert_eq!(error("QEMU ended before the answer\n--- end"), "QEMU ended before the answer");
        assert_eq!(guard(|| Ok(7)).unwrap(), 7);
    }
}
