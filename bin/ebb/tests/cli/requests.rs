//! What each command asks of the daemon, and what it prints of the answer.

use std::fs;

use serde_json::{Value, json};

use crate::a_status;
use crate::harness::{self, Answer, Dir, ebb};

#[test]
fn a_size_that_is_not_reached_has_an_exit_code_of_its_own() {
    for (state, code) in [("waiting", 3), ("reached", 0), ("off", 0)] {
        let dir = Dir::new();
        let report = json!({ "bytes": 2u64 << 30, "wanted_bytes": 1u64 << 30, "node": null,
            "mechanism": "balloon", "reason": "less than it began with", "state": state,
            "least_bytes": null, "taken_bytes": 0, "emptied_bytes": 0, "returned_bytes": 0,
            "purges": 0, "duration_ns": 1_500_000, "stopped_by": "the guest needs it" });
        let _daemon = dir.daemon(Answer::json(200, &report));
        let ran = ebb(dir.path(), "resize web 1G");
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(code), ""), "{state}");
        assert!(ran.stdout.contains("the guest needs it"), "{}", ran.stdout);
    }
}

#[test]
fn run_sends_absolute_paths_and_the_working_directory() {
    let dir = Dir::new();
    fs::write(dir.path().join("vmlinuz"), "").unwrap();
    let daemon = dir.daemon(Answer::json(200, &a_status()));
    let mut command = harness::command(
        dir.path(),
        "run --name web --memory 2G --cpus 2 --kernel vmlinuz --append console=ttyS0 -- -hda disk.img",
    );
    command.0.current_dir(dir.path());
    let ran = command.run();
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    for expected in
        ["web is managed", "tcg      stock kernels do not boot", "tail -f /run/ebb/web/console"]
    {
        assert!(ran.stdout.contains(expected), "{expected}: {}", ran.stdout);
    }
    let request = daemon.request();
    assert_eq!(request.line, "POST /v1/vms/run HTTP/1.1");
    assert_eq!(request.body["kernel"], json!(dir.path().join("vmlinuz")));
    assert_eq!(request.body["cwd"], json!(dir.path()));
    assert_eq!(request.body["qemu_args"], json!(["-hda", "disk.img"]));
    assert_eq!(request.body["memory_bytes"], json!(2u64 << 30));
    assert_eq!(request.body["mode"], Value::Null);
}

/// Runs a command beside a daemon that gives this answer. Checks what it asks for, and what it
/// prints.
fn asks(line: &str, request: &str, body: &Value, answer: &Value, expected: &str) {
    let dir = Dir::new();
    let daemon = dir.daemon(Answer::json(200, answer));
    let ran = ebb(dir.path(), line);
    assert_eq!(ran.code, Some(0), "{line}: {}", ran.stderr);
    assert!(ran.stdout.contains(expected), "{line}: {}", ran.stdout);
    let asked = daemon.request();
    assert_eq!((asked.line, &asked.body), (format!("{request} HTTP/1.1"), body), "{line}");
}

fn a_reclaim() -> Value {
    json!({ "bytes": 4 << 20, "blocks": 1, "duration_ns": 1_500_000, "scan_ns": 1000,
        "stopped_by": "asked for amount reached",
        "skipped": { "in_use": 0, "already_empty": 0, "cancelled": 0 } })
}

#[test]
fn commands_that_take_memory_or_give_it_back_ask_for_what_they_say() {
    let mut limit = a_status()["limit"].clone();
    for (field, mib) in [("bytes", 200u64), ("high_bytes", 190), ("low_bytes", 180)] {
        limit[field] = json!(mib << 20);
    }
    asks(
        "limit web 200M --low 180M",
        "PUT /v1/vms/web/limit",
        &json!({ "bytes": 200 << 20, "low_bytes": 180 << 20, "high_bytes": null }),
        &limit,
        "200 MiB: evicted down to 180 MiB, faults wait above 190 MiB",
    );
    asks("list", "GET /v1/vms", &Value::Null, &json!([]), "no VM is managed");
    asks(
        "reclaim web --bytes 4M",
        "POST /v1/vms/web/reclaim",
        &json!({ "bytes": 4 << 20 }),
        &a_reclaim(),
        "reclaimed 4 MiB in 1 blocks",
    );
    asks(
        "evict web --bytes 4K",
        "POST /v1/vms/web/evict",
        &json!({ "bytes": 4096 }),
        &json!({ "saved_bytes": 4096, "saved_frames": 1, "abandoned": 0, "duration_ns": 9,
            "stopped_by": "asked for amount reached" }),
        "evicted 4 KiB in 1 frames",
    );
    asks(
        "detach web",
        "DELETE /v1/vms/web",
        &Value::Null,
        &json!({ "restored_bytes": 4 << 20, "duration_ns": 2_000_000 }),
        "4 MiB brought back in 2 ms",
    );
}

#[test]
fn automatic_reclaim_is_asked_for_as_it_is_said() {
    asks(
        "auto web on --interval 5s",
        "PUT /v1/vms/web/auto",
        &json!({ "on": true, "interval_ms": 5000, "keep_bytes": null }),
        &json!({ "on": true, "interval_ms": 5000, "keep_bytes": 0, "last": a_reclaim() }),
        "on, every 5 s, leaves 0 B free",
    );
    asks(
        "auto web on --when pressure --below 5%",
        "PUT /v1/vms/web/auto",
        &json!({ "on": true, "when": "pressure", "interval_ms": null, "below_percent": 5,
            "keep_bytes": null }),
        &json!({ "on": true, "when": "pressure", "interval_ms": 5000, "below_percent": 5,
            "keep_bytes": 0, "last": null, "pressure": { "seen_by": "PSI", "rounds": 2,
                "why": "host: available 1 GiB below 2 GiB", "age_s": 7 } }),
        "2 rounds, the last 7 s ago: host: available 1 GiB below 2 GiB",
    );
    asks(
        "auto web off --below 1G",
        "PUT /v1/vms/web/auto",
        &json!({ "on": false, "interval_ms": null, "below_bytes": 1u64 << 30, "keep_bytes": null }),
        &json!({ "on": false, "interval_ms": 5000, "keep_bytes": 0, "last": null }),
        "off",
    );
    asks("auto web", "GET /v1/vms/web", &Value::Null, &a_status(), "web: automatic reclaim\n");
}

#[test]
fn a_size_is_asked_for_as_it_is_said() {
    asks(
        "resize web 1G --node 1 --by virtio-mem",
        "PUT /v1/vms/web/size",
        &json!({ "bytes": 1u64 << 30, "node": 1, "by": "virtio_mem", "on_violation": null }),
        &json!({ "bytes": 1u64 << 30, "wanted_bytes": 1u64 << 30, "node": 1,
            "mechanism": "virtio_mem", "reason": "nothing else knows of NUMA nodes",
            "state": "reached", "least_bytes": null, "taken_bytes": 1u64 << 30, "emptied_bytes": 0,
            "returned_bytes": 0, "purges": 0, "duration_ns": 1_500_000,
            "stopped_by": "the target was reached" }),
        "has 1 GiB on node 1, target 1 GiB",
    );
    asks(
        "resize web off",
        "PUT /v1/vms/web/size",
        &json!({ "bytes": null, "node": null, "by": null, "on_violation": null }),
        &json!({ "bytes": 1u64 << 30, "wanted_bytes": 1u64 << 30, "node": null,
            "mechanism": "virtio_mem", "reason": "it stays as it is", "state": "off",
            "least_bytes": null, "taken_bytes": 0, "emptied_bytes": 0, "returned_bytes": 0,
            "purges": 0, "duration_ns": 0, "stopped_by": "there was no target" }),
        "web stays at 1 GiB: there was no target\n",
    );
}

#[test]
fn commands_of_the_pool_and_of_tiers_ask_for_what_they_say() {
    let pool = json!({ "bytes": 4u64 << 30, "shares_bytes": 1u64 << 30, "free_bytes": 3u64 << 30,
        "vms": [{ "name": "web", "share_bytes": 1u64 << 30, "lower_bytes": 512 << 20,
            "upper_bytes": 1280 << 20, "hot_bytes": null, "held_bytes": 800 << 20,
            "goal_bytes": 1u64 << 30, "limit_bytes": 1u64 << 30 }] });
    asks(
        "share web 1G --lower 50",
        "PUT /v1/vms/web/share",
        &json!({ "bytes": 1u64 << 30, "lower_percent": 50, "upper_percent": null }),
        &pool,
        "web   1 GiB  512 MiB",
    );
    asks(
        "pool 4G",
        "PUT /v1/pool",
        &json!({ "bytes": 4u64 << 30 }),
        &pool,
        "pool of 4 GiB: 1 GiB in shares, 3 GiB unassigned",
    );
    asks("pool", "GET /v1/pool", &Value::Null, &pool, "unknown  800 MiB");
    asks(
        "calibrate",
        "POST /v1/calibration",
        &Value::Null,
        &json!({ "tiers": [{ "tier": "file", "read_ns": 80000, "write_ns": 9000 }],
            "read_weight": 2, "write_weight": 3 }),
        "80 us to read a page, 9 us to write one",
    );
    let heat = json!({ "monitoring": true, "windows_done": 3, "windows": 8, "failed": null,
        "figures": { "age_s": 7, "windows": 8, "duration_ms": 5000, "tracker": "vmm_table",
            "tracker_reason": "its guest is not trusted", "host_needs": "nothing",
            "read_weight": 1, "write_weight": 1, "degree_max": 8, "memory_bytes": 1u64 << 30,
            "used_bytes": 4096, "hot_bytes": 4096, "looking_us": 9, "tables_read": 0,
            "tables_pruned": 0, "marks_cleared": 1, "is_truncated": false,
            "degrees": [{ "degree": 8, "bytes": 4096 }], "block_bytes": 2 << 20, "regions": [
                { "start": 0, "blocks": [{ "degree": 6.5, "used_bytes": 0, "hot_bytes": 0 }] }] } });
    let fresh = json!({ "fresh": false });
    asks("heat web --json", "POST /v1/vms/web/heat", &fresh, &heat, "\"degree\": 6.5");
}

fn a_job(state: &str) -> Value {
    json!({ "id": 1795871112345u64, "kind": "evict", "vm": "web", "state": state,
        "can_cancel": true, "cancelling": false, "begun": "2026-11-28T14:05:12.345Z", "ended": null,
        "progress": { "done": 3 << 20, "total": 4 << 20, "unit": "bytes" },
        "text": "evicted 3 MiB: it was cancelled", "error": null })
}

#[test]
fn in_the_background_only_a_number_is_printed() {
    let id = "1795871112345\n";
    for (line, request, body) in [
        ("reclaim web", "POST /v1/vms/web/reclaim", json!({ "bytes": null })),
        ("evict web --bytes 4M", "POST /v1/vms/web/evict", json!({ "bytes": 4 << 20 })),
        ("heat web --fresh", "POST /v1/vms/web/heat", json!({ "fresh": true })),
        (
            "resize web 1G",
            "PUT /v1/vms/web/size",
            json!({ "bytes": 1u64 << 30, "node": null, "by": null, "on_violation": null }),
        ),
        ("detach web", "DELETE /v1/vms/web", Value::Null),
        ("calibrate", "POST /v1/calibration", Value::Null),
    ] {
        let line = format!("{line} --background");
        let dir = Dir::new();
        let daemon = dir.daemon(Answer::json(202, &a_job("waiting")));
        let ran = ebb(dir.path(), &line);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), id), "{line}: {}", ran.stderr);
        let asked = daemon.request();
        assert_eq!(
            (asked.line, asked.body),
            (format!("{request}?job=true HTTP/1.1"), body),
            "{line}"
        );
    }
}

#[test]
fn a_daemon_that_knows_no_jobs_has_done_it() {
    let dir = Dir::new();
    let _daemon = dir.daemon(Answer::json(200, &a_reclaim()));
    let ran = ebb(dir.path(), "reclaim web --background");
    assert!(ran.code == Some(1) && ran.is_one_line_with("all is done already"), "{}", ran.stderr);
}

#[test]
fn on_a_terminal_it_is_done_without_a_job_if_there_is_no_room_for_one() {
    let (job, alone) = ("POST /v1/vms/web/reclaim?job=true", "POST /v1/vms/web/reclaim");
    for (status, code, asked, ends) in
        [(429, "too_many", &[job, alone][..], 0), (422, "not_trusted", &[job][..], 1)]
    {
        let dir = Dir::new();
        let refusal = json!({ "code": code, "error": "no", "hint": null });
        let (refused, done) = (Answer::json(status, &refusal), Answer::json(200, &a_reclaim()));
        let answer = move |line: &str| {
            if line.contains("?job=true") { refused.clone() } else { done.clone() }
        };
        let daemon = dir.daemon_by(Answer::text(200, "{}"), answer);
        let ran = harness::command(dir.path(), "reclaim web").run_on_terminal();
        assert_eq!(ran.code, Some(ends), "{}", ran.stderr);
        assert_eq!(ran.stdout.contains("reclaimed 4 MiB"), ends == 0, "{}", ran.stdout);
        let asked: Vec<String> = asked.iter().map(|line| format!("{line} HTTP/1.1")).collect();
        assert_eq!(daemon.lines(), asked);
    }
}

#[test]
fn a_job_that_somebody_cancels_has_an_exit_code_of_its_own() {
    let mut cut = a_job("cancelled");
    cut["reclaim"] = a_reclaim();
    let stays = "ebb: job 1795871112345 was cancelled; what it did until then stays done";
    let nothing = "ebb: job 1795871112345 was cancelled: evicted 3 MiB: it was cancelled";
    for (answer, line, is_report) in [(cut, stays, true), (a_job("cancelled"), nothing, false)] {
        let dir = Dir::new();
        let _daemon = dir.daemon(Answer::json(202, &answer));
        let ran = harness::command(dir.path(), "reclaim web").run_on_terminal();
        assert_eq!((ran.code, ran.stderr.trim_end()), (Some(4), line));
        assert_eq!(ran.stdout.contains("reclaimed 4 MiB"), is_report, "{}", ran.stdout);
    }
}

#[test]
fn jobs_are_listed_and_cancelled() {
    let running = "1795871112345  web  evict  running  3 MiB of 4 MiB";
    asks("jobs", "GET /v1/jobs", &Value::Null, &json!([a_job("running")]), running);
    asks("jobs", "GET /v1/jobs", &Value::Null, &json!([]), "no job is known");
    asks("jobs --json", "GET /v1/jobs", &Value::Null, &json!([a_job("done")]), "\"done\": 3145728");
    asks(
        "jobs cancel 1795871112345",
        "DELETE /v1/jobs/1795871112345",
        &Value::Null,
        &a_job("cancelled"),
        "job 1795871112345: cancelled: evicted 3 MiB: it was cancelled\n",
    );
}
