//! Memory that a daemon and its helpers hold for themselves.

use std::fs;

use vmtest::Host;

/// The processes of a daemon.
pub struct Holders(Vec<i32>);

impl Holders {
    /// Lists the daemon's processes of this host that run now.
    pub fn of(host: &Host) -> Holders {
        Holders(host.holders())
    }

    /// Returns anonymous memory and page tables of all the processes, in bytes. What they map of
    /// guests belongs to the guests. A process that has ended counts as zero.
    pub fn bytes(&self) -> u64 {
        let status = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/status"));
        self.0.iter().map(|pid| of_status(&status(pid).unwrap_or_default())).sum()
    }
}

fn of_status(status: &str) -> u64 {
    let kib = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0)
    };
    (kib("RssAnon") + kib("VmPTE")) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_memory_is_not_the_daemons() {
        let status = "VmPTE:\t     8 kB\nRssAnon:\t    12 kB\nRssShmem:\t 4096 kB\n";
        assert_eq!(of_status(status), 20 << 10);
        assert_eq!(of_status(""), 0);
        assert!(Holders(vec![std::process::id() as i32]).bytes() > 0);
    }
}
