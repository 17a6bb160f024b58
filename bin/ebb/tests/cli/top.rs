//! `ebb top` as scripts use it, and where it cannot be shown.

use serde_json::{Value, json};

use crate::harness::{Answer, Dir, ebb};

fn figures() -> Value {
    let host = json!({
        "total_bytes": 1u64 << 36, "available_bytes": 1u64 << 35, "reserve_bytes": 1u64 << 32,
        "stall_permille": null, "pilot": "off", "stage": null, "bounds": []
    });
    let parts = json!({
        "in_use_bytes": 1 << 30, "free_bytes": null, "empty_bytes": 1 << 29,
        "compressed_bytes": 0, "swapped_bytes": 1 << 29, "disk_backed_bytes": 0
    });
    let vm = json!({
        "name": "web", "state": "held", "state_reason": null, "age_ms": 3,
        "memory_bytes": 1u64 << 31, "parts": parts, "compressed_in_bytes": 0,
        "limit_bytes": null, "limit_by_pilot": false, "working_bytes": null, "faults_per_s": 7,
        "fault_ns": { "counts": [0, 12, 5], "p50": 3500, "p99": 15_900 },
        "refaulted_bytes_per_s": null, "misses_memory": false, "waits": false,
        "waiting_touches": 0, "class": "batch", "hold": true, "warnings": 1
    });
    json!({ "at_unix_ms": 0, "host": host, "vms": [vm] })
}

#[test]
fn a_screen_is_printed_as_text() {
    let dir = Dir::new();
    let daemon = dir.daemon(Answer::json(200, &figures()));
    let ran = ebb(dir.path(), "top --once");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    let row = ran.stdout.lines().find(|line| line.contains("web")).unwrap();
    let words: Vec<&str> = row.split_whitespace().take(12).collect();
    let wanted = ["web", "-", "1.00G", "?", "512M", "0", "512M", "0", "2.00G", "?", "7", "batch"];
    assert_eq!(words, wanted, "{}", ran.stdout);
    assert!(row.contains("held") && row.contains("1 warning: ebb status"), "{row}");
    assert!(ran.stdout.contains("no PSI") && ran.stdout.contains("pilot off"), "{}", ran.stdout);
    assert!(!ran.stdout.contains('\x1b'));
    assert!(daemon.request().line.starts_with("GET /v1/top "));
}

#[test]
fn a_filter_leaves_other_vms_out() {
    let dir = Dir::new();
    let _daemon = dir.daemon(Answer::json(200, &figures()));
    let ran = ebb(dir.path(), "top --once --filter db");
    assert!(ran.stdout.contains("no VM has \"db\" in its name"), "{}", ran.stdout);
}

#[test]
fn json_is_the_daemons_own() {
    let dir = Dir::new();
    let _daemon = dir.daemon(Answer::json(200, &figures()));
    let ran = ebb(dir.path(), "top --json");
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), figures());
}

#[test]
fn history_is_asked_for_what_was_last() {
    let dir = Dir::new();
    let mut later = figures();
    later["at_unix_ms"] = json!(15_000);
    let history = json!({ "step_s": 15, "points": [figures(), later] });
    let daemon = dir.daemon(Answer::json(200, &history));
    let ran = ebb(dir.path(), "top --json --at 1970-01-03T00:00");
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), later, "{}", ran.stderr);
    assert!(daemon.request().line.starts_with("GET /v1/history?from="));
    let dir = Dir::new();
    let empty = json!({ "step_s": 15, "points": [] });
    let _daemon = dir.daemon(Answer::json(200, &empty));
    let ran = ebb(dir.path(), "top --at 1970-01-03T00:00 --once");
    assert!(ran.is_one_line_with("nothing is on record up to 1970-01-03"), "{}", ran.stderr);
}

#[test]
fn without_a_terminal_there_is_another_way() {
    let dir = Dir::new();
    let ran = ebb(dir.path(), "top");
    assert_eq!(ran.code, Some(1));
    assert!(ran.is_one_line_with("use ebb list, or ebb top --once"), "{}", ran.stderr);
}
