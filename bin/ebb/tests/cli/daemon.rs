//! The daemon as `ebb` meets it: started, absent, ended, or of another release.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::harness::{self, Answer, Dir, Ran, ebb};

#[test]
fn without_a_daemon_to_start_it_says_what_to_install() {
    let dir = Dir::new();
    let ran = dir.own_ebb("pool 1G").env("PATH", dir.path()).run();
    assert_eq!(ran.code, Some(1));
    assert!(ran.is_one_line_with("no ebbd beside ebb or in PATH"), "{}", ran.stderr);
}

#[test]
fn a_daemon_that_ends_at_once_is_quoted() {
    let dir = Dir::new();
    fs::create_dir(dir.run_dir()).unwrap();
    fs::write(dir.run_dir().join("ebbd.log"), "from an earlier life\n").unwrap();
    dir.script("ebbd", "echo starting; echo no userfaultfd on this kernel >&2; exit 1");
    let ran = dir.own_ebb("list").run();
    assert_eq!(ran.code, Some(1));
    assert!(
        ran.is_one_line_with("ebbd does not run: no userfaultfd on this kernel"),
        "{}",
        ran.stderr
    );

    dir.script("ebbd", "exit 3");
    let ran = dir.own_ebb("list").run();
    assert!(ran.is_one_line_with("wrote nothing to"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("earlier life"), "{}", ran.stderr);
}

#[test]
fn the_daemon_is_started_with_its_run_directory_made_private() {
    let dir = Dir::new();
    dir.script("ebbd", r#"echo "$@"; exit 1"#);
    let ran = dir.own_ebb("pool 1G").run();
    let expected = format!("--background --run-dir {}", dir.run_dir().display());
    assert!(ran.is_one_line_with(&expected), "{}", ran.stderr);
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(dir.run_dir()), 0o700);
    assert_eq!(mode(dir.run_dir().join("ebbd.log")), 0o600);
}

#[test]
fn what_only_looks_makes_no_run_directory() {
    let dir = Dir::new();
    dir.script("ebbd", "exit 1");
    let ran = dir.own_ebb("list").run();
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "no VM is managed\n"));
    assert!(ran.stderr.contains("EBB_RUN_DIR"), "{}", ran.stderr);
    for line in ["status web", "pool", "detach web", "limit web 1G"] {
        let ran = dir.own_ebb(line).run();
        assert_eq!(ran.code, Some(1), "{line}");
        assert!(ran.is_one_line_with("no VM is managed in"), "{line}: {}", ran.stderr);
    }
    assert!(!dir.run_dir().exists());
}

#[test]
fn a_wrong_setting_is_quoted_from_the_daemons_first_line() {
    let dir = Dir::new();
    let said =
        "error: invalid value 'x' for '--swap-max <SIZE>'\n\nFor more information, try --help";
    dir.script("ebbd", &format!("printf \"{said}\" >&2; exit 2"));
    let ran = dir.own_ebb("pool 1G").run();
    let expected = "ebb: ebbd does not run: invalid value 'x' for '--swap-max <SIZE>': it ended";
    assert!(ran.stderr.starts_with(expected), "{}", ran.stderr);
}

#[test]
fn without_permission_it_asks_for_root() {
    const NOBODY: u32 = 65534;
    let dir = Dir::new();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(dir.run_dir()).unwrap();
    fs::set_permissions(dir.run_dir(), Permissions::from_mode(0o000)).unwrap();
    let mut command = dir.own_ebb("list");
    if rustix::process::geteuid().is_root() {
        command.0.uid(NOBODY);
    }
    let ran = command.run();
    assert_eq!(ran.code, Some(1));
    assert!(ran.is_one_line_with("run ebb as root"), "{}", ran.stderr);
}

#[test]
fn a_refusal_comes_through_in_the_daemons_words() {
    let dir = Dir::new();
    let daemon = dir.daemon(Answer::json(404, &json!({ "error": "no VM is called web" })));
    let ran = ebb(dir.path(), "status web");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), "ebb: no VM is called web\n"));
    assert_eq!(daemon.request().line, "GET /v1/vms/web?counts=true HTTP/1.1");
}

#[test]
fn an_answer_of_no_known_form_is_an_error() {
    for (answer, expected) in [
        (
            Answer::text(500, "it broke\nbadly"),
            "ebbd answered 500 Internal Server Error: it broke badly",
        ),
        (Answer::text(200, "{}"), "both are not from one release"),
        // This process is the daemon.
        (Answer::text(200, "{}"), &format!("(`kill {}`)", std::process::id())),
        (Answer::nothing(), "without an answer; its messages on standard error"),
    ] {
        let dir = Dir::new();
        let _daemon = dir.daemon(answer);
        let ran = ebb(dir.path(), "status web");
        assert_eq!(ran.code, Some(1));
        assert!(ran.is_one_line_with(expected), "{}", ran.stderr);
    }
}

#[test]
fn a_daemon_of_another_release_is_reported_as_such() {
    let dir = Dir::new();
    let version = json!({ "version": "0.0.9", "pid": 7, "run_dir": "/run/ebb" });
    let _daemon = dir.daemon_of(Answer::json(200, &version), Answer::text(404, ""));
    let ran = ebb(dir.path(), "heat web");
    let own = env!("CARGO_PKG_VERSION");
    let expected = format!("404 Not Found; ebbd is 0.0.9 and ebb is {own}: end ebbd (`kill ");
    assert!(ran.is_one_line_with(&expected), "{}", ran.stderr);
}

#[test]
fn an_older_daemon_that_does_not_know_a_request_is_reported_as_such() {
    let dir = Dir::new();
    let version = json!({ "version": "0.0.9", "pid": 7, "run_dir": "/run/ebb" });
    let refusal = json!({ "error": "there is no path /v1/pool", "code": "unknown_route",
        "hint": "GET /v1/openapi.json describes all requests of this release" });
    let _daemon = dir.daemon_of(Answer::json(200, &version), Answer::json(404, &refusal));
    let ran = ebb(dir.path(), "pool");
    assert!(ran.is_one_line_with("there is no path /v1/pool; ebbd is 0.0.9 and"), "{}", ran.stderr);
}

#[test]
fn ctrl_c_says_that_the_daemon_goes_on() {
    for line in ["detach web", "resize web 1G"] {
        let dir = Dir::new();
        let daemon = dir.daemon(Answer::never());
        let mut command = harness::command(dir.path(), line);
        let child = command.0.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        daemon.request();
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(130), "{line}: {}", ran.stderr);
        assert!(ran.is_one_line_with("goes on: see `ebb status web`"), "{line}");
    }
}

#[test]
fn a_daemon_that_ends_in_the_middle_has_its_log_named() {
    let dir = Dir::new();
    let log = dir.path().join("ebbd.log");
    fs::write(&log, "panicked\n").unwrap();
    let _daemon = dir.daemon(Answer::nothing());
    let ran = ebb(dir.path(), "status web");
    let expected = format!("without an answer; its log, {}, may say why", log.display());
    assert!(ran.is_one_line_with(&expected), "{}", ran.stderr);
}
