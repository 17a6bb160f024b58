//! Directories into which others could put something are not used.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

/// The message of an `ebbd` that does not start.
fn refused(run_dir: &Path, swap_dir: &Path) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ebbd"));
    command.arg("--run-dir").arg(run_dir).arg("--swap-dir").arg(swap_dir);
    // This little compressed memory is refused, so it does not start, whatever else it finds.
    command.args(["--compressed", "1"]);
    let output = command.output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_daemon_does_not_start_where_others_can_write() {
    let base = tempfile::tempdir().unwrap();
    let path = |name| base.path().join(name);
    let (good, link, open) = (path("good"), path("link"), path("open"));
    for directory in [&good, &open] {
        fs::create_dir(directory).unwrap();
    }
    symlink(&good, &link).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    let why = refused(&link, &good);
    assert!(why.contains("run directory") && why.contains("symbolic link"), "{why}");
    let why = refused(&open, &good);
    assert!(why.contains("run directory") && why.contains("chmod go-w"), "{why}");
    for swap_dir in [&link, &open] {
        let why = refused(&path("run"), swap_dir);
        assert!(why.contains("swap directory") && why.trim().lines().count() == 1, "{why}");
    }
    assert_eq!(fs::read_dir(&good).unwrap().count(), 0);
    assert_eq!(fs::read_dir(&open).unwrap().count(), 0);
}

#[test]
fn a_directory_in_use_names_the_process_to_end() {
    let base = tempfile::tempdir().unwrap();
    let run = base.path().join("run");
    fs::create_dir(&run).unwrap();
    fs::set_permissions(&run, Permissions::from_mode(0o700)).unwrap();
    let lock = fs::File::create(run.join("ebbd.lock")).unwrap();
    lock.lock().unwrap();
    let why = refused(&run, &run);
    assert!(why.contains("another ebbd runs with") && !why.contains("kill"), "{why}");
    let _listener = UnixListener::bind(run.join("ebbd.sock")).unwrap();
    let why = refused(&run, &run);
    assert!(why.contains(&format!("(`kill {}`)", std::process::id())), "{why}");
    assert_eq!(why.trim().lines().count(), 1, "{why}");
}

#[test]
fn a_swap_directory_that_is_named_is_not_made() {
    let base = tempfile::tempdir().unwrap();
    let mistyped = base.path().join("disk").join("swpa");
    let why = refused(&base.path().join("run"), &mistyped);
    assert!(why.contains("there is no swap directory") && why.contains("mkdir -m 700"), "{why}");
    assert_eq!(why.trim().lines().count(), 1, "{why}");
    assert!(!base.path().join("disk").exists());
}

/// The guests of such VMs wait for what was evicted.
#[test]
fn vms_on_record_are_served_without_the_swap_directory() {
    let base = tempfile::tempdir().unwrap();
    let (run, mistyped) = (base.path().join("run"), base.path().join("swpa"));
    for directory in [run.clone(), run.join("vms"), run.join("vms/a")] {
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
    }
    fs::write(run.join("vms/a/vm.json"), "").unwrap();
    let why = refused(&run, &mistyped);
    let lines: Vec<&str> = why.trim().lines().collect();
    let [warning, end] = lines[..] else { panic!("{why}") };
    assert!(warning.contains("there is no swap directory") && warning.contains("are served"));
    assert!(end.starts_with("ebbd: --compressed"), "{end}");
    assert!(!mistyped.exists());
}

#[test]
fn swap_files_in_memory_are_warned_of() {
    let base = tempfile::tempdir_in("/dev/shm").unwrap();
    let on_disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let builds_in_memory = ebb_sys::memory_fs::is_in_memory(on_disk.path()).unwrap();
    for (swap_dir, warns) in [(base.path(), true), (on_disk.path(), builds_in_memory)] {
        let why = refused(&base.path().join("run"), swap_dir);
        assert!(why.contains("--compressed"), "{why}");
        let warned = why.lines().filter(|line| line.contains("saves nothing")).count();
        assert_eq!(warned, usize::from(warns), "{why}");
    }
}
