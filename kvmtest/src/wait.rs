//! Waiting for an event, never for a time.

use std::fmt::Display;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait. Two vCPUs and a fault thread on two busy cores may stall for seconds with nothing
/// lost.
pub const DEADLINE: Duration = Duration::from_secs(60);

const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Waits until `probe` finds something.
///
/// # Panics
/// `probe` finds nothing within [`DEADLINE`].
pub fn until<T>(what: impl Display, mut probe: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        if Instant::now() > end {
            panic!("waited {DEADLINE:?} in vain for {what}\n{}", threads());
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Returns what each thread of this process waits for, as the kernel tells it.
fn threads() -> String {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.map(|task| thread_line(&task.path())).collect()
}

fn thread_line(task: &Path) -> String {
    let file = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default();
    let status = file("status");
    let state = status.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or(" ended");
    format!("  {:<16}{:<16} in {}\n", file("comm").trim(), state.trim(), file("wchan"))
}
