//! The figures of a daemon whose VMs' processes are stand-ins.

mod deploy;

use ebb_observe::{NotKnown, Observed};

use super::*;
use crate::host::swap_dir::SwapDir;
use crate::host::testing;
use crate::model::figures::VmFigures;
use crate::model::times::Times;

fn text_of(seen: Snapshot) -> String {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(seen));
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    text
}

/// The value of a figure with these labels.
fn value(text: &str, figure: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(figure)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {figure} in {text}")).parse().unwrap()
}

#[test]
fn figures_are_those_of_the_status() {
    let run = tempfile::tempdir().unwrap();
    let daemon = testing::daemon(run.path(), SwapDir::new(run.path(), None).unwrap());
    let (status, piloted) = (testing::status(), testing::piloted());
    testing::publish(&daemon, "web", status.clone(), Some(piloted.clone()));
    let text = Metrics::default().text(&daemon).unwrap();
    for (figure, expected) in [
        ("ebb_vm_memory_bytes{vm=\"web\"}", status.memory_bytes),
        ("ebb_vm_memory_resident_bytes{vm=\"web\"}", status.resident_bytes),
        ("ebb_vm_memory_working_bytes{vm=\"web\"}", piloted.working_bytes.unwrap()),
        ("ebb_vm_up{vm=\"web\"}", 1),
        ("ebb_vm_faults_total{vm=\"web\",kind=\"missing\"}", status.faults.missing),
        ("ebb_vm_refaulted_bytes_total{vm=\"web\"}", status.limit.refaulted_total_bytes),
        ("ebb_vm_evicted_bytes_total{vm=\"web\",to=\"store\"}", status.limit.saved_total_bytes),
        ("ebb_pilot_mode{mode=\"off\"}", 1),
        ("ebb_pilot_mode{mode=\"on\"}", 0),
    ] {
        assert!((value(&text, figure) - expected as f64).abs() < 0.5, "{figure}: {text}");
    }
    let parts = text.lines().filter(|line| line.starts_with("ebb_vm_memory_part_bytes{"));
    let sum: f64 = parts.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum();
    assert!((sum - status.memory_bytes as f64).abs() < 0.5, "{text}");
    assert!(
        value(&text, "ebb_host_memory_bytes") >= value(&text, "ebb_host_memory_available_bytes")
    );
    assert!(text.contains("# TYPE ebb_vm_faults counter\n"), "{text}");
    assert!(!text.contains("ebb_pilot_stage{"), "the pilot is off: {text}");
    assert!(text.ends_with("# EOF\n"));
}

/// Publishes these times of a VM that is called web, and returns all figures.
fn text_with(times: Times) -> String {
    let run = tempfile::tempdir().unwrap();
    let daemon = testing::daemon(run.path(), SwapDir::new(run.path(), None).unwrap());
    let (status, times) = (testing::status(), Some(times));
    let figures = VmFigures { number: 1, status, member: None, piloted: None, times };
    testing::publish_all(&daemon, "web", figures);
    Metrics::default().text(&daemon).unwrap()
}

#[test]
fn times_are_histograms_in_seconds() {
    let durations = |counts: [u64; 14], sum_ns| Durations { counts: counts.to_vec(), sum_ns };
    let missing = durations([5, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2], 3_000_000_000);
    let text = text_with(Times {
        missing: missing.clone(),
        metadata: durations([0; 14], 0),
        refill: durations([0; 14], 0),
        reclaim: missing,
        install: None,
    });
    let of = |name: &str, labels: &str| value(&text, &format!("ebb_vm_{name}{{{labels}}}"));
    let kind = "vm=\"web\",kind=\"missing\"";
    for (le, expected) in [
        ("0.000001024", 5.0),
        ("0.000004096", 5.0),
        ("0.000016384", 25.0),
        ("17.179869184", 25.0),
        ("+Inf", 27.0),
    ] {
        let found = of("fault_duration_seconds_bucket", &format!("le=\"{le}\",{kind}"));
        assert!((found - expected).abs() < 0.5, "{le}: {text}");
    }
    assert!((of("fault_duration_seconds_sum", kind) - 3.0).abs() < 1e-9);
    assert!((of("fault_duration_seconds_count", kind) - 27.0).abs() < 0.5);
    assert!((of("reclaim_duration_seconds_count", "vm=\"web\"") - 27.0).abs() < 0.5);
    assert!(of("refill_duration_seconds_count", "vm=\"web\"").abs() < 0.5);
    assert!(!text.contains("ebb_vm_install_duration_seconds_count"), "{text}");
    assert!(text.contains("# TYPE ebb_vm_fault_duration_seconds histogram\n"), "{text}");
}

#[test]
fn times_that_cannot_be_true_are_left_out() {
    let text_of_install = |counts| {
        let none = || Durations { counts: vec![0; 14], sum_ns: 0 };
        let install = Some(Durations { counts, sum_ns: u64::MAX });
        let (missing, metadata, refill, reclaim) = (none(), none(), none(), none());
        text_with(Times { missing, metadata, refill, reclaim, install })
    };
    let is_told = |text: &str| text.contains("_duration_seconds_count{");
    assert!(is_told(&text_of_install(vec![1; 14])));
    for counts in [vec![], vec![1; 13], vec![1; 1000], vec![u64::MAX; 14]] {
        let text = text_of_install(counts);
        assert!(text.contains("ebb_vm_memory_bytes{"), "the other figures are told: {text}");
        assert!(!is_told(&text), "{text}");
    }
}

#[test]
fn what_is_not_known_is_left_out() {
    let run = tempfile::tempdir().unwrap();
    let daemon = testing::daemon(run.path(), SwapDir::new(run.path(), None).unwrap());
    let mut status = testing::status();
    (status.guest_free_bytes, status.limit.bytes, status.parts) = (None, None, None);
    testing::publish(&daemon, "web", status, None);
    let text = Metrics::default().text(&daemon).unwrap();
    let has = |name: &str| text.contains(&format!("{name}{{"));
    assert!(has("ebb_vm_memory_bytes") && !has("ebb_vm_memory_free_bytes"), "{text}");
    assert!(!has("ebb_vm_limit_bytes") && !has("ebb_vm_memory_part_bytes"), "{text}");
    assert!(!has("ebb_vm_memory_working_bytes"), "{text}");
}

#[test]
fn a_guests_name_breaks_no_line() {
    let name = "a\"} 7\nebb_host_memory_bytes 1\\";
    let observed =
        Observed { memory_bytes: 1 << 30, resident_bytes: 5, usage: Err(NotKnown::Counters) };
    let guest = Guest { pid: 17, name: Some(name.into()), observed: Ok(observed) };
    let run = tempfile::tempdir().unwrap();
    let daemon = testing::daemon(run.path(), SwapDir::new(run.path(), None).unwrap());
    let host = Host::of(&daemon).unwrap();
    let text = text_of(Snapshot { host, swap: None, vms: Vec::new(), guests: vec![guest] });
    let labels = "{guest=\"a_} 7_ebb_host_memory_bytes 1_\",pid=\"17\"}";
    let resident = value(&text, &format!("ebb_guest_memory_resident_bytes{labels}"));
    assert!((resident - 5.0).abs() < 0.5);
    assert!(!text.contains("ebb_guest_memory_used_bytes{"), "its usage is not known: {text}");
    assert_eq!(word(&"x".repeat(1000)).len(), WORD_LETTERS_MOST);
}
