//! `ebb doctor`: what it judges, for root and for others.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use serde_json::{Value, json};

use crate::harness::{self, Dir, ebb};

#[test]
fn doctor_judges_every_point_and_changes_nothing() {
    let dir = Dir::new();
    let run_dir = dir.path().join("run");
    let ran = ebb(&run_dir, "doctor --json");
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().filter_map(|check| check["check"].as_str()).collect();
    let expected = [
        "privilege",
        "userfaultfd",
        "device node",
        "users",
        "shmem THP",
        "hugetlb",
        "host pressure",
        "QEMU",
        "/dev/kvm",
        "run directory",
        "swap directory",
    ];
    assert_eq!(names, expected);
    let missing = checks.iter().any(|check| check["verdict"] == "missing");
    assert_eq!(ran.code, Some(i32::from(missing)));
    for check in checks.iter().filter(|check| check["verdict"] != "ok") {
        assert!(check["cost"].is_string() && check["mend"].is_string(), "{check}");
    }
    assert_eq!(report["fixed"], json!([]));
    assert!(!run_dir.exists());
}

/// If this test runs as root, it runs `ebb` as a user without privilege.
#[test]
fn a_user_without_privilege_hears_so_first_and_what_only_root_can_see() {
    const NOBODY: u32 = 65534;
    let dir = Dir::new();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let doctor = |run_dir: &str| {
        let mut command = dir.own_ebb("doctor --json");
        command.0.arg("--run-dir").arg(run_dir).env_remove("EBB_ALLOW_KEYS_ON_DISK");
        if rustix::process::geteuid().is_root() {
            command.0.uid(NOBODY).gid(NOBODY);
        }
        let ran = command.run();
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        let report: Value = serde_json::from_str(&ran.stdout).unwrap();
        report["checks"].as_array().unwrap().clone()
    };
    // The directory exists, is in memory, and belongs to root.
    let checks = doctor("/dev");
    let check_of = |name: &str| checks.iter().find(|check| check["check"] == name).unwrap();
    assert_eq!(checks[0]["check"], "privilege");
    assert_eq!(checks[0]["verdict"], "missing");
    let mend = checks[0]["mend"].as_str().unwrap();
    assert!(mend.contains("as root"), "{mend}");
    if fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap().trim() == "0" {
        for name in ["userfaultfd", "device node"] {
            assert_eq!(check_of(name)["verdict"], "unknown", "{}", check_of(name));
        }
    }
    assert_eq!(check_of("run directory")["verdict"], "unknown", "{}", check_of("run directory"));
    assert!(
        check_of("users")["found"].as_str().unwrap().contains("only root"),
        "{}",
        check_of("users")
    );
    for check in &checks {
        assert!(!check.to_string().contains("chown"), "{check}");
        assert!(!check.to_string().contains("nodev"), "{check}");
    }
}

#[test]
fn doctor_refuses_the_run_directory_that_run_refuses() {
    // The directory does not exist, and would not be in memory.
    let mut command = harness::command("/proc/self/nowhere".as_ref(), "doctor --json");
    command.0.env_remove("EBB_ALLOW_KEYS_ON_DISK");
    let report: Value = serde_json::from_str(&command.run().stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["check"] == "run directory").unwrap();
    assert_eq!(check["verdict"], "missing", "{check}");
    assert!(check["mend"].as_str().unwrap().contains("EBB_RUN_DIR"), "{check}");
}
