//! The program as a user meets it: exit codes, one clear line, and nothing changed on bad input.

mod harness;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use ebb_api::VmStatus;
use harness::{Answer, Dir, Ran, ebb};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

#[test]
fn bad_usage_is_one_line_and_exit_2() {
    for (line, told) in [
        ("run --memory 2G --kernel /dev/null", "not provided: --name <NAME>"),
        ("run --name web", "not provided: --memory <SIZE>"),
        ("run --name ../web --memory 2G", "is no VM name"),
        ("run --name web --memory 2X", "is no size"),
        ("run --name web --memory 2G", "nothing to boot"),
        ("run --name web --memory 2G --append quiet -- -hda x", "need --kernel"),
        ("run --name web --memory 2049 --kernel /dev/null", "give 64 MiB to 1 TiB"),
        ("run --name web --memory 2T --kernel /dev/null", "give 64 MiB to 1 TiB"),
        ("run --name web --memory 65M --kernel /dev/null", "not a multiple of 2 MiB"),
        ("run --name web --memory 2G --cpus 0 --kernel /dev/null", "give 1 to 255"),
        ("run --name web --memory 2G --cpus 256 --kernel /dev/null", "give 1 to 255"),
        (
            "run --name web --memory 2G --backing gold --kernel /dev/null",
            "auto, hugetlb, thp, small",
        ),
        ("run --name web --memory 2G --mode loose --kernel /dev/null", "strict, release"),
        ("run --name web --memory 2G --min-order 11 --kernel /dev/null", "give 6 to 10"),
        ("attach --name web --pid 4242 --min-order 5", "give 6 to 10"),
        ("attach --name web --pid 0", "the pid of no QEMU"),
        ("attach --name web --pid four", "invalid digit"),
        ("auto web maybe", "for '<on|off>' [possible values: on, off]"),
        ("auto web", "not provided: <on|off>"),
        ("auto web on --interval 5", "as in 5s"),
        ("auto web on --interval 1ms", "give 100ms to 24h"),
        ("reclaim web --bytes lots", "is no size"),
        ("limit web off --low 100M", "belong to a limit"),
        ("limit web 200M --high 201M", "above the limit of 200 MiB"),
        ("limit web 200M --low 180M --high 180M", "not below 180 MiB"),
        ("limit web 200M --low 200M", "not below 200 MiB"),
        ("resize web lots", "as in 512M, or `off`"),
        ("resize web 2G --by magic", "hyperalloc, balloon, virtio-mem"),
        ("resize web off --by balloon", "belong to a size"),
        ("resize web off --node 0", "belong to a size"),
        ("run --name web --memory 2G --grow-to 1G --kernel /dev/null", "give more than 2 GiB"),
        ("run --name web --memory 2G --grow-to 2049M --kernel /dev/null", "multiple of 2 MiB"),
        ("run --name web --memory 2G --nodes 17 --kernel /dev/null", "give 1 to 16"),
        ("run --name web --memory 2G --nodes 2 --kernel /dev/null", "cannot be shared evenly"),
        ("evict web", "not provided: --bytes <SIZE>"),
        ("heat", "not provided: <NAME>"),
        ("pool lots", "as in 512M, or `off`"),
        ("share web", "not provided: <SIZE|off>"),
        ("share web off --lower 50", "belong to a share"),
        ("share web 0", "a share of nothing"),
        ("share web 1G --lower 101", "give 1 to 100"),
        ("share web 1G --upper 99", "give 100 to 10000"),
        ("statsu web", "a similar subcommand exists: 'status'"),
        ("foo", "unrecognized subcommand 'foo': ebb help shows all"),
    ] {
        let dir = Dir::new();
        let run_dir = dir.path().join("run");
        let ran = ebb(&run_dir, line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.stderr);
        assert!(ran.is_one_line_with(told), "{line}: {}", ran.stderr);
        assert!(!run_dir.exists(), "{line}");
    }
}

#[test]
fn files_that_are_not_there_are_named() {
    let dir = Dir::new();
    let run_dir = dir.path().join("run");
    for (line, told) in [
        ("run --name web --memory 2G --kernel /nowhere/vmlinuz", "/nowhere/vmlinuz: No such file"),
        ("run --name web --memory 2G --kernel /dev", "/dev is not a file"),
        ("attach --name web --pid 4242 --qmp /dev/null", "/dev/null is not a UNIX socket"),
        ("heat web --svg /nowhere/a.svg", "/nowhere is no directory"),
        ("heat web --svg /dev", "/dev is a directory"),
    ] {
        let ran = ebb(&run_dir, line);
        assert_eq!(ran.code, Some(1), "{line}: {}", ran.stderr);
        assert!(ran.is_one_line_with(told), "{line}: {}", ran.stderr);
        assert!(!run_dir.exists(), "{line}");
    }
}

#[test]
fn without_a_daemon_to_start_it_says_what_to_install() {
    let dir = Dir::new();
    let ran = dir.own_ebb("list").env("PATH", dir.path()).run();
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
    let ran = dir.own_ebb("list").run();
    let told = format!("--background --run-dir {}", dir.run_dir().display());
    assert!(ran.is_one_line_with(&told), "{}", ran.stderr);
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(dir.run_dir()), 0o700);
    assert_eq!(mode(dir.run_dir().join("ebbd.log")), 0o600);
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
    assert!(ran.is_one_line_with("run it as root"), "{}", ran.stderr);
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
    for (answer, told) in [
        (
            Answer::text(500, "it broke\nbadly"),
            "ebbd answered 500 Internal Server Error: it broke badly",
        ),
        (Answer::text(200, "{}"), "both are not from one release"),
        // This process is the daemon.
        (Answer::text(200, "{}"), &format!("(`kill {}`)", std::process::id())),
        (Answer::nothing(), "without an answer; who started it has its messages"),
    ] {
        let dir = Dir::new();
        let _daemon = dir.daemon(answer);
        let ran = ebb(dir.path(), "status web");
        assert_eq!(ran.code, Some(1));
        assert!(ran.is_one_line_with(told), "{}", ran.stderr);
    }
}

#[test]
fn a_daemon_of_another_release_is_told_as_such() {
    let dir = Dir::new();
    let version = json!({ "version": "0.0.9", "pid": 7, "run_dir": "/run/ebb" });
    let _daemon = dir.daemon_of(Answer::json(200, &version), Answer::text(404, ""));
    let ran = ebb(dir.path(), "heat web");
    let own = env!("CARGO_PKG_VERSION");
    let told = format!("404 Not Found; ebbd is 0.0.9 and ebb is {own}: end ebbd (`kill ");
    assert!(ran.is_one_line_with(&told), "{}", ran.stderr);
}

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
        assert!(ran.is_one_line_with("goes on in the daemon: see `ebb status web`"), "{line}");
    }
}

#[test]
fn a_daemon_that_ends_in_the_middle_has_its_log_named() {
    let dir = Dir::new();
    let log = dir.path().join("ebbd.log");
    fs::write(&log, "panicked\n").unwrap();
    let _daemon = dir.daemon(Answer::nothing());
    let ran = ebb(dir.path(), "status web");
    let told = format!("without an answer; its log, {}, may say why", log.display());
    assert!(ran.is_one_line_with(&told), "{}", ran.stderr);
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
    for told in
        ["web is managed", "tcg      stock kernels do not boot", "tail -f /run/ebb/web/console"]
    {
        assert!(ran.stdout.contains(told), "{told}: {}", ran.stdout);
    }
    let request = daemon.request();
    assert_eq!(request.line, "POST /v1/vms/run HTTP/1.1");
    assert_eq!(request.body["kernel"], json!(dir.path().join("vmlinuz")));
    assert_eq!(request.body["cwd"], json!(dir.path()));
    assert_eq!(request.body["qemu_args"], json!(["-hda", "disk.img"]));
    assert_eq!(request.body["memory_bytes"], json!(2u64 << 30));
    assert_eq!(request.body["mode"], Value::Null);
}

#[test]
fn each_command_asks_for_what_it_says() {
    let report = json!({ "bytes": 4 << 20, "blocks": 1, "duration_ns": 1_500_000, "scan_ns": 1000,
        "stopped_by": "asked for amount reached",
        "skipped": { "in_use": 0, "already_empty": 0, "cancelled": 0 } });
    let auto = json!({ "on": true, "interval_ms": 5000, "keep_bytes": 0, "last": report });
    let evict = json!({ "saved_bytes": 4096, "saved_frames": 1, "abandoned": 0, "duration_ns": 9,
        "stopped_by": "asked for amount reached" });
    let resize = json!({ "bytes": 1u64 << 30, "wanted_bytes": 1u64 << 30, "node": 1,
        "mechanism": "virtio_mem", "reason": "nothing else knows of NUMA nodes",
        "state": "reached", "least_bytes": null, "taken_bytes": 1u64 << 30, "emptied_bytes": 0,
        "returned_bytes": 0, "purges": 0, "duration_ns": 1_500_000,
        "stopped_by": "the size asked for was reached" });
    let stays = json!({ "bytes": 1u64 << 30, "wanted_bytes": 1u64 << 30, "node": null,
        "mechanism": "virtio_mem", "reason": "it stays as it is", "state": "off",
        "least_bytes": null, "taken_bytes": 0, "emptied_bytes": 0, "returned_bytes": 0,
        "purges": 0, "duration_ns": 0, "stopped_by": "no size was sought" });
    let pool = json!({ "bytes": 4u64 << 30, "shares_bytes": 1u64 << 30, "free_bytes": 3u64 << 30,
        "vms": [{ "name": "web", "share_bytes": 1u64 << 30, "lower_bytes": 512 << 20,
            "upper_bytes": 1280 << 20, "hot_bytes": null, "held_bytes": 800 << 20,
            "goal_bytes": 1u64 << 30, "limit_bytes": 1u64 << 30 }] });
    let heat = json!({ "monitoring": true, "windows_done": 3, "windows": 8, "failed": null,
        "figures": { "age_s": 7, "windows": 8, "duration_ms": 5000, "tracker": "vmm_table",
            "tracker_reason": "its guest is not trusted", "host_needs": "nothing",
            "read_weight": 1, "write_weight": 1, "degree_max": 8, "memory_bytes": 1u64 << 30,
            "used_bytes": 4096, "hot_bytes": 4096, "looking_us": 9, "tables_read": 0,
            "tables_pruned": 0, "marks_cleared": 1, "is_truncated": false,
            "degrees": [{ "degree": 8, "bytes": 4096 }], "block_bytes": 2 << 20, "regions": [
                { "start": 0, "blocks": [{ "degree": 6.5, "used_bytes": 0, "hot_bytes": 0 }] }] } });
    let detach = json!({ "restored_bytes": 4 << 20, "duration_ns": 2_000_000 });
    let mut limit = a_status()["limit"].clone();
    for (field, mib) in [("bytes", 200u64), ("high_bytes", 190), ("low_bytes", 180)] {
        limit[field] = json!(mib << 20);
    }
    for (line, request, body, answer, told) in [
        (
            "limit web 200M --low 180M",
            "PUT /v1/vms/web/limit",
            json!({ "bytes": 200 << 20, "low_bytes": 180 << 20, "high_bytes": null }),
            limit,
            "200 MiB: evicted down to 180 MiB, faults wait above 190 MiB",
        ),
        ("list", "GET /v1/vms", Value::Null, json!([]), "no VM is managed"),
        (
            "reclaim web --bytes 4M",
            "POST /v1/vms/web/reclaim",
            json!({ "bytes": 4 << 20 }),
            report.clone(),
            "reclaimed 4 MiB in 1 blocks",
        ),
        (
            "auto web on --interval 5s",
            "PUT /v1/vms/web/auto",
            json!({ "on": true, "interval_ms": 5000, "keep_bytes": null }),
            auto,
            "on, every 5 s, keeps 0 B free",
        ),
        (
            "resize web 1G --node 1 --by virtio-mem",
            "PUT /v1/vms/web/size",
            json!({ "bytes": 1u64 << 30, "node": 1, "by": "virtio_mem", "on_violation": null }),
            resize,
            "has 1 GiB on node 1, target 1 GiB",
        ),
        (
            "resize web off",
            "PUT /v1/vms/web/size",
            json!({ "bytes": null, "node": null, "by": null, "on_violation": null }),
            stays,
            "web stays at 1 GiB: no size was sought\n",
        ),
        (
            "heat web --json",
            "POST /v1/vms/web/heat",
            json!({ "fresh": false }),
            heat,
            "\"degree\": 6.5",
        ),
        (
            "share web 1G --lower 50",
            "PUT /v1/vms/web/share",
            json!({ "bytes": 1u64 << 30, "lower_percent": 50, "upper_percent": null }),
            pool.clone(),
            "web   1 GiB  512 MiB",
        ),
        (
            "pool 4G",
            "PUT /v1/pool",
            json!({ "bytes": 4u64 << 30 }),
            pool.clone(),
            "pool of 4 GiB: 1 GiB in shares, 3 GiB unassigned",
        ),
        ("pool", "GET /v1/pool", Value::Null, pool, "unknown  800 MiB"),
        (
            "calibrate",
            "POST /v1/calibration",
            Value::Null,
            json!({ "tiers": [{ "tier": "file", "read_ns": 80000, "write_ns": 9000 }],
                "read_weight": 2, "write_weight": 3 }),
            "80 us to read a page, 9 us to write one",
        ),
        (
            "evict web --bytes 4K",
            "POST /v1/vms/web/evict",
            json!({ "bytes": 4096 }),
            evict,
            "evicted 4 KiB in 1 frames",
        ),
        ("detach web", "DELETE /v1/vms/web", Value::Null, detach, "4 MiB brought back in 2 ms"),
    ] {
        let dir = Dir::new();
        let daemon = dir.daemon(Answer::json(200, &answer));
        let ran = ebb(dir.path(), line);
        assert_eq!(ran.code, Some(0), "{line}: {}", ran.stderr);
        assert!(ran.stdout.contains(told), "{line}: {}", ran.stdout);
        let asked = daemon.request();
        assert_eq!((asked.line, asked.body), (format!("{request} HTTP/1.1"), body), "{line}");
    }
}

#[test]
fn status_json_is_the_daemons_own() {
    let dir = Dir::new();
    let _daemon = dir.daemon(Answer::json(200, &a_status()));
    let ran = ebb(dir.path(), "status web --json");
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), a_status());
}

#[test]
fn every_field_of_status_json_is_documented() {
    let page = include_str!("../../../docs/status.md");
    let mut paths = Vec::new();
    leaves("", &a_status(), &mut paths);
    assert!(paths.len() > 40, "{paths:?}");
    for path in paths {
        assert!(page.contains(&format!("| `{path}` |")), "docs/status.md has no line for {path}");
    }
}

fn leaves(path: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                leaves(format!("{path}.{name}").trim_start_matches('.'), value, found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}

#[test]
fn status_of_an_unknown_hostile_guest_is_still_readable() {
    let dir = Dir::new();
    let mut status = a_status();
    status["guest"]["kernel"] = json!("6.1\u{1b}[2J\ntrusted yes");
    status["guest_free_bytes"] = Value::Null;
    let _daemon = dir.daemon(Answer::json(200, &status));
    let ran = ebb(dir.path(), "status web");
    assert!(ran.stdout.contains("guest         kernel 6.1?[2J?trusted yes, "), "{}", ran.stdout);
    assert!(ran.stdout.lines().count() <= 10, "more than a few lines: {}", ran.stdout);
    let dir = Dir::new();
    let _daemon = dir.daemon(Answer::json(200, &status));
    let ran = ebb(dir.path(), "status web --verbose");
    assert!(ran.stdout.contains("kernel        6.1?[2J?trusted yes\n"), "{}", ran.stdout);
    assert!(ran.stdout.contains("guest free    unknown\n"), "{}", ran.stdout);
    assert!(ran.stdout.contains("console       tail -f /run/ebb/web/console"), "{}", ran.stdout);
    assert!(ran.stdout.lines().count() <= 54, "more than a screen: {}", ran.stdout);
}

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
    let told = |name: &str| checks.iter().find(|check| check["check"] == name).unwrap();
    assert_eq!(checks[0]["check"], "privilege");
    assert_eq!(checks[0]["verdict"], "missing");
    let mend = checks[0]["mend"].as_str().unwrap();
    assert!(mend.contains("as root"), "{mend}");
    if fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap().trim() == "0" {
        for name in ["userfaultfd", "device node"] {
            assert_eq!(told(name)["verdict"], "unknown", "{}", told(name));
        }
    }
    assert_eq!(told("run directory")["verdict"], "unknown", "{}", told("run directory"));
    assert!(told("users")["found"].as_str().unwrap().contains("only root"), "{}", told("users"));
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
    let told = checks.iter().find(|check| check["check"] == "run directory").unwrap();
    assert_eq!(told["verdict"], "missing", "{told}");
    assert!(told["mend"].as_str().unwrap().contains("EBB_RUN_DIR"), "{told}");
}

#[test]
fn completions_and_man_pages_come_from_the_same_definition() {
    let dir = Dir::new();
    for shell in ["bash", "zsh", "fish"] {
        let ran = ebb(dir.path(), &format!("completions {shell}"));
        assert!(ran.stdout.contains("min-order"), "{shell}");
    }
    assert_eq!(ebb(dir.path(), &format!("man {}", dir.path().display())).code, Some(0));
    let page = fs::read_to_string(dir.path().join("ebb-run.1")).unwrap();
    assert!(page.contains("min\\-order"), "{page}");
}

/// Status of a VM that is managed and trusted, before its first fault.
fn a_status() -> Value {
    let text = include_str!("status.json");
    serde_json::to_value(serde_json::from_str::<VmStatus>(text).unwrap()).unwrap()
}
