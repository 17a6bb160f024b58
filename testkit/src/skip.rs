//! Skipped tests: which ones cannot run here, and why.

use std::env;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use crate::target::target_directory;

/// Returns from the test, and records it as skipped, if the requirement (a `Result<_, String>`) is
/// an error.
#[macro_export]
macro_rules! require {
    ($requirement:expr) => {
        if let Err(reason) = $requirement {
            fn here() {}
            $crate::skip::record(std::any::type_name_of_val(&here), &reason);
            return;
        }
    };
}

/// Records that the test around `function` did not run.
///
/// # Panics
/// The report cannot be written: a silent skip would look like a success.
pub fn record(function: &str, reason: &str) {
    let test = function.trim_end_matches("::here");
    let line = format!("SKIPPED {test}: {reason}\n");
    eprint!("{line}");
    let mut report = File::options().append(true).create(true).open(path()).expect("skip report");
    report.write_all(line.as_bytes()).expect("skip report");
}

/// Returns the report's path: `EBB_SKIP_REPORT`, or a file in the target directory.
fn path() -> PathBuf {
    let default = || target_directory().join("skipped.txt");
    env::var_os("EBB_SKIP_REPORT").map_or_else(default, PathBuf::from)
}
