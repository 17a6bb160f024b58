//! Processor time of other processes' threads.

use std::fs;
use std::time::Duration;

/// A thread of a process.
pub struct Thread {
    pub name: String,
    directory: String,
}

/// The threads of `pid` that run now.
pub fn threads(pid: i32) -> Vec<Thread> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let directory = entry.path().to_str()?.to_owned();
            let name = fs::read_to_string(format!("{directory}/comm")).ok()?.trim().to_owned();
            Some(Thread { name, directory })
        })
        .collect()
}

/// What all threads of `pid` have run for so far.
pub fn of_process(pid: i32) -> Duration {
    threads(pid).iter().map(Thread::ran).sum()
}

impl Thread {
    /// Time on a processor so far: exact, from the scheduler.
    pub fn ran(&self) -> Duration {
        let text = fs::read_to_string(format!("{}/schedstat", self.directory)).unwrap_or_default();
        let first = text.split_whitespace().next().and_then(|ns| ns.parse().ok());
        Duration::from_nanos(first.unwrap_or(0))
    }
}

/// Time that all threads of `pid` have spent in the kernel; by ticks of 10 ms.
pub fn in_kernel(pid: i32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let field = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(12));
    let ticks: u64 = field.and_then(|ticks| ticks.parse().ok()).unwrap_or(0);
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_run() {
        let pid = std::process::id() as i32;
        let before = of_process(pid);
        while of_process(pid) == before {}
        assert!(in_kernel(pid) < Duration::from_secs(3600));
    }
}
