//! What a process has cost the host so far.

use std::fs;
use std::ops::Sub;
use std::time::Duration;

use anyhow::Context;

/// Cost of a process since it started, or between two looks at it.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Usage {
    /// Page faults, minor and major.
    pub faults: u64,
    /// Processor time of all threads, with that in the kernel.
    pub processor: Duration,
    /// Processor time of all threads in the kernel.
    pub kernel: Duration,
    /// Time that threads were ready to run and had no processor.
    pub waited: Duration,
}

impl Usage {
    /// Returns the cost of the process `pid` since it started.
    ///
    /// # Errors
    /// There is no such process.
    pub fn of(pid: i32) -> anyhow::Result<Usage> {
        let path = format!("/proc/{pid}/stat");
        let stat = fs::read_to_string(&path).with_context(|| path.clone())?;
        let ticks_per_second = rustix::param::clock_ticks_per_second();
        let usage = parse(&stat, ticks_per_second);
        let usage = usage.with_context(|| format!("{path} is not what it was"))?;
        Ok(Usage { waited: waited(pid), ..usage })
    }
}

impl Sub for Usage {
    type Output = Usage;

    fn sub(self, before: Usage) -> Usage {
        Usage {
            faults: self.faults.saturating_sub(before.faults),
            processor: self.processor.saturating_sub(before.processor),
            kernel: self.kernel.saturating_sub(before.kernel),
            waited: self.waited.saturating_sub(before.waited),
        }
    }
}

/// Parses `minflt`, `majflt`, `utime` and `stime` of proc_pid_stat(5). The name in brackets may
/// contain anything, so fields are counted from behind it.
fn parse(stat: &str, ticks_per_second: u64) -> Option<Usage> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let time =
        |ticks: u64| Duration::try_from_secs_f64(ticks as f64 / ticks_per_second as f64).ok();
    let kernel = time(field(15)?)?;
    let processor = time(field(14)?)? + kernel;
    Some(Usage { faults: field(10)? + field(12)?, processor, kernel, waited: Duration::ZERO })
}

/// Returns how long the living threads have waited for a processor, or zero if the kernel does not
/// count that.
fn waited(pid: i32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let accounts = threads.flat_map(|thread| fs::read_to_string(thread.path().join("schedstat")));
    accounts.flat_map(|account| run_delay(&account)).sum()
}

/// Parses the second of the three numbers in the kernel's
/// `Documentation/scheduler/sched-stats.rst`.
fn run_delay(schedstat: &str) -> Option<Duration> {
    let ns = schedstat.split_whitespace().nth(1)?.parse().ok()?;
    Some(Duration::from_nanos(ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_whatever_the_program_is_called() {
        let stat = "7 (a) b 1) S 1 7 7 0 -1 4194560 300 5 20 6 110 40 0 0";
        let [processor, kernel] = [1500, 400].map(Duration::from_millis);
        assert_eq!(
            parse(stat, 100),
            Some(Usage { faults: 320, processor, kernel, waited: Duration::ZERO })
        );
        assert_eq!(parse("7 (a) S 1", 100), None);
        assert_eq!(run_delay("12 3456 7\n"), Some(Duration::from_nanos(3456)));
    }

    #[test]
    fn ones_own_grows() {
        let before = Usage::of(std::process::id() as i32).unwrap();
        let pages = std::hint::black_box(vec![1u8; 8 << 20]);
        let used = Usage::of(std::process::id() as i32).unwrap() - before;
        assert!(used.faults > 0, "{used:?} for {}", pages.len());
    }
}
