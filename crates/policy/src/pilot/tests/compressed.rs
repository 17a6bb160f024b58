//! Cold memory is compressed first, and goes to the disk only once the host is short.

use super::*;

/// A VM that has `taken_mib` of at most `most_mib` of compressed memory.
fn compressed(name: &str, taken_mib: u64, most_mib: u64) -> VmSight {
    let (bytes, most_bytes) = (taken_mib * MIB, most_mib * MIB);
    let compressed = CompressedSight { bytes, most_bytes, own_bytes: 0 };
    VmSight { compressed: Some(compressed), ..vm(name) }
}

/// Changes of compressed memory, in MiB.
fn sizes(decisions: &[Decision]) -> Vec<(&str, u64, Option<u64>)> {
    let size = |decision: &Decision| match decision.action {
        Action::Compress { from, to } => Some((from / MIB, to.map(|bytes| bytes / MIB))),
        _ => None,
    };
    decisions.iter().filter_map(|it| size(it).map(|(from, to)| (&*it.vm, from, to))).collect()
}

#[test]
fn a_tight_host_compresses_before_it_takes() {
    let vms = [compressed("web", 0, 0), vm("without")];
    let decisions = once(2000, &vms);
    assert_eq!(sizes(&decisions), [("web", 0, Some(512))]);
    assert_eq!(limits(&decisions), [("without", Some(3072 - 41))], "it cannot compress");
    let why = &decisions[0].why;
    assert!(why.starts_with("cold memory is compressed before") && why.contains("tight"), "{why}");
    let action = decisions[0].action.to_string();
    assert_eq!(action, "compressed memory 0 B -> 512 MiB");
    // Then it gives.
    let decisions = once(2000, &[compressed("web", 0, 512)]);
    assert_eq!((sizes(&decisions).len(), limits(&decisions).len()), (0, 1));
}

#[test]
fn a_host_that_has_enough_or_is_short_gives_no_compressed_memory() {
    for available in [8192, 1000, 400] {
        assert_eq!(sizes(&once(available, &[compressed("web", 0, 0)])), [], "{available} MiB");
    }
}

#[test]
fn a_host_that_has_enough_gives_back_what_the_operator_had_given() {
    let own = |limit_mib: Option<u64>, own_mib| {
        let (bytes, most_bytes, own_bytes) = (0, 64 * MIB, own_mib * MIB);
        let compressed = Some(CompressedSight { bytes, most_bytes, own_bytes });
        let limit_bytes = limit_mib.map(|limit| limit * MIB);
        once(8192, &[VmSight { compressed, limit_bytes, ..vm("web") }])
    };
    assert_eq!(sizes(&own(None, 1024)), [("web", 64, None)]);
    // What is compressed is not written without need.
    assert_eq!(sizes(&own(None, 0)), []);
    assert_eq!(sizes(&own(Some(2048), 1024)), [], "its limit is lifted first");
}

#[test]
fn a_short_host_writes_to_the_disk_what_is_compressed() {
    // All that has cold memory gives that first.
    let busy =
        |name, taken| VmSight { working_bytes: Some(3072 * MIB), ..compressed(name, taken, 512) };
    let decisions = once(900, &[busy("web", 300), busy("none", 0)]);
    // A 25th of its memory in a second.
    assert_eq!(sizes(&decisions), [("web", 512, Some(300 - 163 - 1))], "{decisions:?}");
    let why = &decisions[0].why;
    assert!(why.starts_with("300 MiB are compressed, and go to the swap file; the host is short"));
    // In a tight host it stays.
    assert_eq!(sizes(&once(2000, &[busy("web", 300)])), []);
}

#[test]
fn batch_vms_write_first_and_only_as_much_as_is_lacking() {
    let busy = |class, name| VmSight {
        rule: VmRule { class, ..VmRule::default() },
        working_bytes: Some(3072 * MIB),
        ..compressed(name, 300, 512)
    };
    let vms = [busy(Class::Normal, "normal"), busy(Class::Batch, "batch")];
    let mut pilot = Pilot::default();
    pilot.look(Duration::ZERO, RULE, &memory(1000), &[]);
    // 192 MiB above the reserve is where the pilot stops.
    let available = 1024 + 192 - 100;
    let decisions = pilot.look(Duration::from_secs(1), RULE, &memory(available), &vms);
    assert_eq!(sizes(&decisions), [("batch", 512, Some(200))]);
}

#[test]
fn compressed_pages_do_not_go_below_the_minimum() {
    let rule = VmRule { min_bytes: Some(3000 * MIB), ..VmRule::default() };
    let working_bytes = Some(3072 * MIB);
    let vm = VmSight { rule, working_bytes, ..compressed("web", 300, 512) };
    assert_eq!(sizes(&once(900, &[vm])), [("web", 512, Some(300 - 72))]);
}

#[test]
fn what_goes_to_the_disk_counts_as_coming() {
    let mut pilot = Pilot::default();
    pilot.look(Duration::ZERO, RULE, &memory(900), &[]);
    let writes = compressed("web", 500, 0);
    let look = |pilot: &mut Pilot, seconds| {
        let vms = [writes.clone(), vm("other")];
        pilot.look(Duration::from_secs(seconds), RULE, &memory(2000), &vms).len()
    };
    assert_eq!(look(&mut pilot, 1), 0, "500 MiB come");
    assert_eq!(look(&mut pilot, 6), 1, "they do not, so the other one gives");
}

#[test]
fn compressed_memory_grows_again_after_a_while() {
    let mut state = VmState::default();
    assert!(state.may_widen(Duration::ZERO));
    state.compressed(Duration::from_secs(1));
    assert!(!state.may_widen(Duration::from_secs(60)));
    assert!(state.may_widen(Duration::from_secs(61)));
}
