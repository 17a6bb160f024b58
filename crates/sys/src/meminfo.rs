//! The host's memory, as `/proc/meminfo` tells it (proc_meminfo(5)).

use std::fs;
use std::io;

/// How much memory the host has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemInfo {
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// What programs can have without swapping, by the kernel's estimate, in bytes: free memory, and
    /// caches that can be dropped. Shared memory, as of VMs' RAM files, is no such cache.
    pub available_bytes: u64,
}

impl MemInfo {
    /// Reads what the host has now.
    ///
    /// # Errors
    /// As read(2). `InvalidData`: the file has another form.
    pub fn read() -> io::Result<MemInfo> {
        let text = fs::read_to_string("/proc/meminfo")?;
        MemInfo::parse(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses the text of such a file, of this host or of a guest. `None`: it has another form.
    pub fn parse(text: &str) -> Option<MemInfo> {
        let [total_bytes, available_bytes] =
            ["MemTotal:", "MemAvailable:"].map(|key| bytes(text, key));
        Some(MemInfo { total_bytes: total_bytes?, available_bytes: available_bytes? })
    }
}

/// The bytes of a line such as `MemAvailable:   21956180 kB`.
fn bytes(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = rest.strip_suffix(" kB")?.trim_start().parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_lines_count() {
        let text =
            "MemTotal:       24683656 kB\nMemFree:        1 kB\nMemAvailable:   21956180 kB\n";
        let expected = MemInfo { total_bytes: 24_683_656 << 10, available_bytes: 21_956_180 << 10 };
        assert_eq!(MemInfo::parse(text), Some(expected));
        assert_eq!(MemInfo::parse("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn malformed_text_is_refused() {
        for text in ["", "k 1", "k kB", "k -1 kB", "k 1 MB", "k 1.5 kB", "xk 1 kB", "k 1 2 kB"] {
            assert_eq!(bytes(text, "k"), None, "{text:?}");
        }
        assert_eq!(bytes(&format!("k {} kB", u64::MAX), "k"), None);
    }

    #[test]
    fn this_host_has_some() {
        let found = MemInfo::read().unwrap();
        assert!(found.available_bytes <= found.total_bytes && found.total_bytes > 1 << 20);
    }
}
