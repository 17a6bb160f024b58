//! What a kernel prints when something is wrong.

/// Beginnings of messages that no healthy kernel prints. Warnings of lockups and stalls are not
/// among them: guests on a test bench are stopped on purpose, and wait for a daemon that was killed
/// on purpose.
const SIGNS: [&str; 12] = [
    "BUG: Bad",
    "BUG: kernel",
    "BUG: unable",
    "BUG: scheduling",
    "kernel BUG at",
    "WARNING: CPU",
    "Oops",
    "Kernel panic",
    "general protection fault",
    "memory corruption",
    "Out of memory",
    "list_del corruption",
];

/// The lines of `log` that are complaints.
pub fn in_log(log: &str) -> Vec<String> {
    let lines = log.lines().filter(|line| SIGNS.iter().any(|sign| line.contains(sign)));
    lines.map(str::to_owned).collect()
}

/// Whether the kernel has panicked.
pub fn is_fatal(log: &str) -> bool {
    log.contains("Kernel panic")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_differ_from_a_healthy_boot() {
        let log = "[    0.1] Linux version 6.1.0\n@0 ready\n[    0.2] watchdog: BUG: soft lockup\n\
                   [    9.1] pagealloc: memory corruption\n[    9.2] BUG: Bad page state in x\n";
        assert_eq!(in_log(log).len(), 2);
    }
}
