//! Threads of a process that a tracer has sent into a call, and that may not have made it yet.
//!
//! A tracer may be frozen, or dead, while the thread that it sent into close(2) is stopped or
//! frozen before the call. The thread closes that number later, whatever has the number by then. So
//! nobody makes or closes a userfaultfd while there is such a thread.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::{Target, timeout};
use crate::process::{is_no_process, line_of};

/// Longest wait for such threads. Calls of our other helpers end within this time.
const TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until no thread of the process is traced, or about to make an injected call. A thread that
/// runs is not seen: it makes its call at once.
///
/// # Errors
/// In words: there is still such a thread. Otherwise as reading `/proc/PID/task`.
pub(super) fn wait_for_none(target: &Target) -> io::Result<()> {
    let deadline = Instant::now() + timeout(TIMEOUT);
    while let Some(why) = any(target)? {
        if Instant::now() > deadline {
            return Err(io::Error::other(why));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

fn any(target: &Target) -> io::Result<Option<String>> {
    for tid in target.process.threads()? {
        match of_thread(target, tid) {
            Err(error) if is_no_process(&error) => {}
            Ok(None) => {}
            found => return found,
        }
    }
    Ok(None)
}

/// Why this thread is such a thread. `None` if it is not.
fn of_thread(target: &Target, tid: i32) -> io::Result<Option<String>> {
    let (pid, of_thread) = (target.pid(), format!("/proc/{}/task/{tid}", target.pid()));
    let status = fs::read(format!("{of_thread}/status"))?;
    let tracer = line_of(&status, "TracerPid:").unwrap_or("0");
    if tracer != "0" {
        return Ok(Some(format!(
            "process {tracer} traces thread {tid} of process {pid}: end process {tracer}, which is a \
             debugger or what is left of an earlier ebbd"
        )));
    }
    let call = fs::read_to_string(format!("{of_thread}/syscall"))?;
    let is_sent = stack_of(&call).is_some_and(|stack| {
        let mut top = [0; 8];
        // The address of the way back lies there from before the call until after it.
        target.memory.read_exact_at(&mut top, stack).is_ok()
            && u64::from_ne_bytes(top) == target.gadgets.go_back
    });
    Ok(is_sent.then(|| {
        format!(
            "thread {tid} of process {pid} has not ended an earlier call of ebbd's: have the process \
             go on if it is frozen or stopped"
        )
    }))
}

/// Parses the stack pointer in a line of `/proc/PID/syscall`. `None`: the thread runs.
fn stack_of(call: &str) -> Option<u64> {
    let mut words = call.split_ascii_whitespace().rev();
    let stack = words.nth(1)?.strip_prefix("0x")?;
    u64::from_str_radix(stack, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_is_the_last_word_but_one() {
        assert_eq!(stack_of("running\n"), None);
        assert_eq!(stack_of("-1 0x7ffc10 0x401000\n"), Some(0x007f_fc10));
        assert_eq!(stack_of("3 0x5 0x0 0x0 0x0 0x0 0x0 0x7ffc10 0x401000\n"), Some(0x007f_fc10));
    }
}
