//! Processor time of other processes and of the host, and the placement of threads.

use std::fs;
use std::time::Duration;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A thread of a process.
pub struct Thread {
    pub name: String,
    number: i32,
    directory: String,
}

/// Returns the current threads of `pid`.
pub fn threads(pid: i32) -> Vec<Thread> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let directory = entry.path().to_str()?.to_owned();
            let number = entry.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(format!("{directory}/comm")).ok()?.trim().to_owned();
            Some(Thread { name, number, directory })
        })
        .collect()
}

/// Returns how long all current threads of `pid` have run so far.
pub fn of_process(pid: i32) -> Duration {
    threads(pid).iter().map(Thread::ran).sum()
}

impl Thread {
    /// Returns the time on a processor so far. It is exact, from the scheduler.
    pub fn ran(&self) -> Duration {
        self.schedstat(0)
    }

    /// Returns the time in which the thread wanted a processor and had none.
    pub fn waited(&self) -> Duration {
        self.schedstat(1)
    }

    fn schedstat(&self, field: usize) -> Duration {
        let text = fs::read_to_string(format!("{}/schedstat", self.directory)).unwrap_or_default();
        let ns = text.split_whitespace().nth(field).and_then(|ns| ns.parse().ok());
        Duration::from_nanos(ns.unwrap_or(0))
    }
}

/// Returns the time that all threads of `pid` have spent in the kernel, in ticks of 10 ms.
pub fn in_kernel(pid: i32) -> Duration {
    stat(pid, [12]).iter().sum()
}

/// Returns how long all threads of `pid` have run so far, ended ones included, in ticks of 10 ms.
pub fn of_all(pid: i32) -> Duration {
    stat(pid, [11, 12]).iter().sum()
}

/// Returns how long all threads of `pid` have run so far, and those children of it that have ended,
/// in ticks of 10 ms.
pub fn with_children(pid: i32) -> Duration {
    stat(pid, [11, 12, 13, 14]).iter().sum()
}

/// Returns fields of `/proc/PID/stat`, counted from behind the name.
fn stat<const N: usize>(pid: i32, fields: [usize; N]) -> [Duration; N] {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    fields.map(|field| {
        let ticks = rest.split_whitespace().nth(field).and_then(|ticks| ticks.parse().ok());
        self::ticks(ticks.unwrap_or(0))
    })
}

/// Returns how long all processors of the host have worked so far, in ticks of 10 ms.
pub fn of_host() -> Duration {
    busy(&fs::read_to_string("/proc/stat").unwrap_or_default())
}

/// Returns the time that the machine beneath gave to others so far, in ticks of 10 ms.
pub fn stolen() -> Duration {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    ticks(of_cpus(&stat).get(7).copied().unwrap_or(0))
}

/// Sums up user, nice, system, interrupts and softirqs: all that is neither idle nor stolen. The
/// first two include the time of KVM guests.
fn busy(stat: &str) -> Duration {
    let of = of_cpus(stat);
    ticks([0, 1, 2, 5, 6].into_iter().filter_map(|index| of.get(index)).sum())
}

/// Returns the figures of all processors together.
fn of_cpus(stat: &str) -> Vec<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

fn ticks(count: u64) -> Duration {
    Duration::from_millis(count * 1000 / rustix::param::clock_ticks_per_second())
}

/// Processes that share one processor until this is dropped.
///
/// The kernel keeps memory that was just freed for the processor that freed it.
pub struct Together {
    pids: Vec<i32>,
    before: CpuSet,
}

impl Together {
    /// Confines all threads of `pids`, and those that they create.
    ///
    /// # Errors
    /// Those of sched_setaffinity(2).
    pub fn new(pids: &[i32]) -> rustix::io::Result<Together> {
        let before = sched_getaffinity(None)?;
        let mut one = CpuSet::new();
        let mut usable = (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu));
        usable.next_back().into_iter().for_each(|cpu| one.set(cpu));
        let together = Together { pids: pids.into(), before };
        together.set(&one);
        Ok(together)
    }

    /// Sets the processors of all threads, any of which may end meanwhile.
    fn set(&self, processors: &CpuSet) {
        for thread in self.pids.iter().flat_map(|&pid| threads(pid)) {
            let _ = sched_setaffinity(Pid::from_raw(thread.number), processors);
        }
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        self.set(&self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_and_stolen_time_is_no_work() {
        let hz = rustix::param::clock_ticks_per_second();
        let stat = format!("cpu  {hz} {hz} {hz} 900 800 {hz} {hz} 700 0 0\ncpu0 1 1 1 1 1 1 1\n");
        assert_eq!(busy(&stat), Duration::from_secs(5));
        assert_eq!(busy(""), Duration::ZERO);
    }

    #[test]
    fn this_process_has_run() {
        let pid = std::process::id() as i32;
        let before = of_process(pid);
        while of_process(pid) == before {}
        assert!(in_kernel(pid) < Duration::from_secs(3600));
    }
}
