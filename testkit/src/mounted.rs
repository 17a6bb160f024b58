//! Running a test again with a file system of its own.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// Where the test that runs again finds its file system.
const HERE: &str = "EBB_TEST_MOUNTED";

/// Runs the test of this path, as `module::tests::name`, again with a tmpfs mounted by these
/// options. In that run, returns its directory. Says that the test is skipped where nothing can be
/// mounted.
///
/// # Panics
/// The test fails in that run.
pub fn mounted(test: &str, options: &str) -> Option<PathBuf> {
    if let Some(directory) = env::var_os(HERE) {
        return Some(directory.into());
    }
    let directory = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o \"$0\" ebb-test \"$1\" || exit 77\nshift\nexec \"$@\"";
    let run = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, options])
        .arg(directory.path())
        .arg(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(HERE, directory.path())
        .output();
    let run = run.unwrap();
    let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    match run.status.success() {
        true => assert!(said.contains("1 passed"), "{said}"),
        false if said.contains("unshare:") || run.status.code() == Some(77) => {
            eprintln!("SKIPPED: no file system can be mounted here: {said}");
        }
        false => panic!("{said}"),
    }
    None
}
