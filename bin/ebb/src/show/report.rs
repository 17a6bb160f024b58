//! A bundle for a bug report.

use ebb_units::Bytes;

use super::row;
use crate::report::Written;

/// Returns what was written, and what to do with it.
pub fn report(written: &Written) -> String {
    let file = written.file.display();
    let head = format!("{file}: {}, {} parts\n", Bytes(written.bytes), written.parts.len());
    let missing: String = written.missing.iter().map(|line| row("missing", line)).collect();
    head + &row("holds", "the host's settings, the status of ebbd and its VMs, and ebbd's log")
        + &row("holds no", "guest memory, console, disk, key or token; README.txt in it has a list")
        + &missing
        + "look through it before you send it\n"
}
