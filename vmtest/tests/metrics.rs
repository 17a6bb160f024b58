//! `GET /metrics` on real VMs, and what `deploy/` makes of its figures, as Prometheus' own checker
//! sees them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use serde_json::Value;
use vmtest::{Guest, Host, assets, require, until_or};

const MIB: u64 = 1 << 20;
const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/prometheus");
const BOARD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/grafana/ebb.json");

/// What `GET /metrics` answers.
fn metrics(host: &Host) -> String {
    let mut stream = UnixStream::connect(host.run_directory().join("ebbd.sock")).expect("ebbd");
    let request = "GET /metrics HTTP/1.1\r\nhost: ebb\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    let (_, text) = answer.split_once("\r\n\r\n").expect("a body");
    text.to_owned()
}

/// The figure of this name that has this label, if it is told.
fn figure(metrics: &str, name: &str, label: &str) -> Option<u64> {
    let is_it = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains(label);
    let value = metrics.lines().find(is_it)?.rsplit(' ').next()?;
    Some(value.parse::<f64>().expect("a number") as u64)
}

#[test]
fn metrics_tell_of_managed_vms_and_of_all_guests() {
    let host = Host::new();
    let guest = || Guest::debian("6.1-cloud").memory("384M").cpus(1);
    let (managed, other) = (host.run(guest()), host.qemu(guest()));
    managed.wait_trusted();
    let total = "ebb_guest_memory_total_bytes";
    let text = until_or(|| {
        let text = metrics(&host);
        let pids = [managed.pid(), other.pid()].map(|pid| format!("pid=\"{pid}\""));
        let totals = pids.map(|pid| figure(&text, total, &pid));
        // Both guests are alike.
        (totals[0]?.abs_diff(totals[1]?) < 4 * MIB).then_some(text)
    });
    let text = text.unwrap_or_else(|| panic!("guests are missing: {}", metrics(&host)));
    let vm = format!("vm=\"{}\"", managed.name());
    assert_eq!(figure(&text, "ebb_vm_memory_bytes", &vm), Some(384 * MIB));
    assert_eq!(figure(&text, "ebb_vm_up", &vm), Some(1));
    let names = text.lines().filter(|line| line.starts_with("ebb_vm_up{"));
    assert_eq!(names.count(), 1, "the other one is not managed: {text}");
}

/// Prometheus takes a total that falls for a restart, and counts all of it once more.
#[test]
fn an_eviction_takes_nothing_from_what_was_given_back() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("384M").cpus(1));
    vm.wait_trusted();
    vm.guest("fill kept 50M");
    let returned = || vm.status().returned_total_bytes;
    let before = returned();
    assert!(before > 50 * MIB, "the guest has used more memory for the first time: {before}");
    vm.ebb(&format!("evict --bytes {}", 384 * MIB)).ok();
    let evicted = returned();
    assert!(evicted >= before, "{evicted}, {before}");
    assert_eq!(vm.guest("check kept"), "0");
    let refilled = returned();
    assert!(refilled >= evicted, "{refilled}, {evicted}");
    assert!(refilled < before + 40 * MIB, "50 MiB were read back: {refilled}, {before}");
}

/// Runs promtool in the directory of the rules. Returns what it complains of, or nothing.
fn complaints(words: &[&str], input: &str) -> String {
    let mut command = Command::new(assets::promtool().expect("it is required"));
    command.args(words).current_dir(RULES).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("promtool starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("promtool reads");
    drop(stdin);
    let output = child.wait_with_output().expect("promtool ends");
    let said = [output.stdout, output.stderr].concat();
    match output.status.success() {
        true => String::new(),
        false => format!("promtool {words:?}: {}", String::from_utf8_lossy(&said)),
    }
}

/// The figures in Prometheus' older text format, which is all that promtool reads. There, the
/// description of a counter has the name with `_total`, too.
fn in_older_format(text: &str) -> String {
    let is_counter = |name: &str| text.contains(&format!("# TYPE {name} counter\n"));
    let older = |line: &str| {
        let name = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
        match name.and_then(|rest| rest.split(' ').next()).filter(|name| is_counter(name)) {
            Some(name) => line.replacen(name, &format!("{name}_total"), 1) + "\n",
            None => line.to_owned() + "\n",
        }
    };
    text.lines().map(older).collect()
}

#[test]
fn times_and_savings_are_counted_and_promtool_has_no_complaint() {
    require!(assets::promtool());
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("384M").cpus(1));
    vm.wait_trusted();
    vm.guest("fill freed 100M");
    vm.guest("free freed");
    vm.reclaim();
    vm.guest("fill kept 50M");
    vm.ebb(&format!("evict --bytes {}", 384 * MIB)).ok();
    assert_eq!(vm.guest("check kept"), "0");
    let label = format!("vm=\"{}\"", vm.name());
    let counted = [
        "ebb_vm_reclaim_duration_seconds_count",
        "ebb_vm_fault_duration_seconds_count",
        "ebb_vm_refill_duration_seconds_count",
        "ebb_vm_refill_duration_seconds_bucket",
        "ebb_vm_saved_byte_seconds_total",
        "ebb_host_swap_available_bytes",
    ];
    // A figure may be smaller than 1 at first; the last bucket is the one that has all.
    let is_counted = |text: &str, name: &str| {
        let mut lines = text.lines().filter(|line| line.starts_with(name));
        lines.any(|line| !line.ends_with(" 0") && !line.ends_with(" 0.0"))
    };
    let text = until_or(|| {
        let text = metrics(&host);
        counted.iter().all(|name| is_counted(&text, name)).then_some(text)
    });
    let text = text.unwrap_or_else(|| panic!("figures are missing: {}", metrics(&host)));
    let figure = |name: &str| figure(&text, name, &label);
    assert_eq!(figure("ebb_vm_reclaim_duration_seconds_count"), Some(1), "{text}");
    assert_eq!(figure("ebb_vm_install_duration_seconds_count"), None, "it shares no allocator");
    assert_eq!(complaints(&["check", "metrics"], &in_older_format(&text)), "");
}

#[test]
fn promtool_complains_of_figures_that_are_named_badly() {
    require!(assets::promtool());
    let text = "# HELP ebb_time_milliseconds A time.\n# TYPE ebb_time_milliseconds gauge\n\
                ebb_time_milliseconds 1\n";
    let said = complaints(&["check", "metrics"], text);
    assert!(said.contains("seconds"), "{said}");
}

#[test]
fn alert_rules_are_valid_and_fire_when_they_should() {
    require!(assets::promtool());
    assert_eq!(complaints(&["check", "rules", "ebb.rules.yml"], ""), "");
    assert_eq!(complaints(&["test", "rules", "ebb.rules.test.yml"], ""), "");
}

/// promtool reads no boards: each expression of this one becomes a rule.
#[test]
fn all_expressions_of_the_board_are_valid() {
    require!(assets::promtool());
    let board: Value = serde_json::from_slice(&fs::read(BOARD).expect("the board")).expect("JSON");
    let panels = board["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array()).flatten();
    let mut rules = "groups:\n- name: board\n  rules:\n".to_owned();
    for (index, target) in targets.enumerate() {
        let text = target["expr"].as_str().expect("an expression");
        let text = text.replace("$__rate_interval", "5m").replace("$__range", "1h");
        // A string of JSON is one of YAML.
        rules += &format!("  - record: board:{index}\n    expr: {}\n", Value::from(text));
    }
    assert!(rules.contains("board:20"), "{rules}");
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(file.path(), &rules).expect("a file");
    let path = file.path().to_str().expect("a path");
    assert_eq!(complaints(&["check", "rules", path], ""), "");
    fs::write(file.path(), rules + "  - record: board:bad\n    expr: sum(\n").expect("a file");
    assert!(!complaints(&["check", "rules", path], "").is_empty(), "it reads no expressions");
}
