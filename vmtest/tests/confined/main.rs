//! The users of QEMUs that Ebb starts, what these QEMUs cannot do, and what Ebb's own processes give
//! up.

mod daemon;
mod denied;
mod qemu;

use std::collections::BTreeMap;
use std::fs;

use vmtest::Guest;

const MIB: u64 = 1 << 20;
const SECRET: &str = "only root is to read this";
/// CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
const FILES: &str = "0000000000000006";

fn guest() -> Guest {
    Guest::debian("6.1-cloud").memory("512M")
}

/// The fields of `/proc/PID/status`.
fn about(pid: i32) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let word = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    lines.map(|(key, value)| (key.to_owned(), word(value))).collect()
}

fn privileges(pid: i32) -> [String; 4] {
    let about = about(pid);
    ["NoNewPrivs", "Seccomp", "CapEff", "CapBnd"].map(|name| about[name].clone())
}
