//! `ebb --host`, as far as no other host is needed: one line, and nothing is started here.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use crate::harness::{Dir, ebb};

#[test]
fn what_is_wrong_is_one_line_and_starts_no_daemon() {
    let dir = Dir::new();
    let token = dir.path().join("token");
    let at =
        |host: &str, rest: &str| format!("--host {host} --token-file {} {rest}", token.display());
    let line = |rest: &str| at("https://127.0.0.1:1", rest);
    let refused = |line: &str, why: &str| {
        let ran = ebb(&dir.run_dir(), line);
        assert_eq!(ran.code, Some(1), "{line}: {}", ran.stderr);
        assert!(ran.is_one_line_with(why), "{line}: {}", ran.stderr);
        assert!(!dir.run_dir().exists(), "{line}");
    };
    for (text, mode, why) in [
        ("secret", 0o644, "chmod go= "),
        ("control secret", 0o600, "has one line, the token alone"),
        ("", 0o600, "has one line, the token alone"),
        ("secret\n", 0o600, "https://127.0.0.1:1: Connection refused"),
    ] {
        fs::write(&token, text).unwrap();
        fs::set_permissions(&token, Permissions::from_mode(mode)).unwrap();
        refused(&line("list"), why);
    }
    refused("--host https://127.0.0.1:1 list", "EBB_TOKEN_FILE");
    refused(&at("http://127.0.0.1:1", "pool 1G"), "only over TLS");
    refused(&at("127.0.0.1:1", "pool 1G"), "https://HOST:PORT");
    refused(&line("--ca /nowhere pool 1G"), "--ca /nowhere: No such file");
    refused(&line("attach --name web --pid 1"), "only on its own host");
    refused(&line("doctor"), "the host that it runs on");
}

#[test]
fn what_asks_nobody_needs_no_other_host() {
    let dir = Dir::new();
    let ran = ebb(&dir.run_dir(), "--host nonsense completions bash");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
}
