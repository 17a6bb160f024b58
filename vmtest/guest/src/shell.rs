//! Shell commands for the host, by busybox.

use std::process::Command;

use crate::{Context, Result};

const BUSYBOX: &str = "/bin/busybox";

/// Runs a shell line whose programs are busybox's. Returns what it prints.
pub fn run(line: &str) -> Result<String> {
    let output = Command::new(BUSYBOX).args(["sh", "-c", line]).output().context(BUSYBOX)?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim_end().into()),
        false => {
            let errors = String::from_utf8_lossy(&output.stderr);
            Err(format!("{}: {}", output.status, errors.trim_end()))
        }
    }
}
