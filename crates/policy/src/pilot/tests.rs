//! The pilot on simulated hosts.

mod between;
mod compressed;
mod plugged;
mod rested;
mod simulated;
mod stages;

use std::slice::from_ref;
use std::time::Duration;

use super::*;
use crate::need::MemoryFigures;
use crate::pressure::{Below, Budget, HostMemory};

const MIB: u64 = 1 << 20;
const RULE: HostRule =
    HostRule { reserve: Below::Bytes(1024 * MIB), stall_permille: Some(150), swap_max_bytes: None };

fn memory(available_mib: u64) -> HostMemory {
    let (name, total_bytes) = ("the host".to_owned(), 16384 * MIB);
    let host = Budget { name, total_bytes, available_bytes: available_mib * MIB };
    HostMemory { host, groups: Vec::new(), stall_permille: Some(0) }
}

/// A VM of 4 GiB that has 3 GiB and works with 1 GiB.
fn vm(name: &str) -> VmSight {
    VmSight {
        name: name.into(),
        rule: VmRule::default(),
        memory_bytes: 4096 * MIB,
        resident_bytes: 3072 * MIB,
        floor_bytes: 112 * MIB,
        limit_bytes: None,
        spare_bytes: 0,
        working_bytes: Some(1024 * MIB),
        refaulted_bytes: 0,
        compressed: None,
        guest: None,
        plugged: None,
        waits: false,
        may_reclaim: true,
        may_limit: true,
    }
}

fn of_class(name: &str, class: Class) -> VmSight {
    VmSight { rule: VmRule { class, ..VmRule::default() }, ..vm(name) }
}

/// Looks once at a host with so much available.
fn once(available_mib: u64, vms: &[VmSight]) -> Vec<Decision> {
    Pilot::default().look(Duration::ZERO, RULE, &memory(available_mib), vms)
}

fn limits(decisions: &[Decision]) -> Vec<(&str, Option<u64>)> {
    let limit = |decision: &'_ Decision| match decision.action {
        Action::Limit { to, .. } => Some(to.map(|bytes| bytes / MIB)),
        Action::Reclaim { .. } | Action::Compress { .. } | Action::Plug { .. } => None,
    };
    decisions.iter().filter_map(|decision| Some((&*decision.vm, limit(decision)?))).collect()
}

#[test]
fn nothing_is_done_on_a_host_with_enough_memory() {
    assert_eq!(once(8192, &[vm("web")]), []);
}

#[test]
fn free_memory_goes_first() {
    let web = VmSight { spare_bytes: 1024 * MIB, ..vm("web") };
    let decisions = once(1536, &[web, vm("db")]);
    assert_eq!(decisions[0].action, Action::Reclaim { bytes: 1024 * MIB });
    assert_eq!(decisions.len(), 1, "it is enough: {decisions:?}");
    let why = &decisions[0].why;
    assert!(why.starts_with("1 GiB free, keeps 0 B; the host: available 1.5 GiB"), "{why}");
}

#[test]
fn a_guest_keeps_some_free_memory_while_the_host_has_enough() {
    let spare = |class| VmSight { spare_bytes: 1024 * MIB, ..of_class("web", class) };
    let bytes = |class| match *once(8192, &[spare(class)]) {
        [Decision { action: Action::Reclaim { bytes }, .. }] => bytes / MIB,
        ref other => panic!("{other:?}"),
    };
    let taken = [Class::Latency, Class::Normal, Class::Batch].map(bytes);
    assert_eq!(taken, [1024 - 512, 1024 - 128, 1024]);
}

#[test]
fn batch_vms_give_cold_memory_first() {
    let vms = [of_class("latency", Class::Latency), vm("normal"), of_class("batch", Class::Batch)];
    // A hundredth of its memory in a second.
    assert_eq!(
        limits(&once(2040, &vms)),
        [("batch", Some(3072 - 41)), ("normal", Some(3072 - 41)), ("latency", Some(3072 - 41))]
    );
    // Less is lacking than the batch VM gives.
    let mut pilot = Pilot::default();
    pilot.look(Duration::ZERO, RULE, &memory(2000), &[]);
    let decisions = pilot.look(Duration::from_secs(1), RULE, &memory(2432 - 20), &vms);
    assert_eq!(limits(&decisions), [("batch", Some(3072 - 20))]);
    assert!(decisions[0].why.contains("works with 1 GiB; the host is tight"), "{decisions:?}");
}

#[test]
fn what_a_vm_works_with_stays_while_others_have_cold_memory() {
    let busy = VmSight { working_bytes: Some(3000 * MIB), ..vm("busy") };
    assert_eq!(limits(&once(900, &[busy, vm("idle")])), [("idle", Some(3072 - 164))]);
}

#[test]
fn only_batch_vms_lose_what_they_work_with_and_only_when_it_is_critical() {
    let busy = |name, class| VmSight { working_bytes: Some(3072 * MIB), ..of_class(name, class) };
    let vms = [busy("normal", Class::Normal), busy("batch", Class::Batch)];
    let probed = [("batch", Some(3072 - 41)), ("normal", Some(3072 - 41))];
    assert_eq!(limits(&once(600, &vms)), probed, "short: nobody has cold memory");
    assert_eq!(limits(&once(500, &vms)), [("batch", Some(3072 - 683))], "critical");
}

#[test]
fn a_critical_host_takes_from_those_who_miss_it_by_class_and_weight() {
    let missing = |name, class, weight| VmSight {
        rule: VmRule { class, weight, ..VmRule::default() },
        limit_bytes: Some(3072 * MIB),
        working_bytes: Some(3072 * MIB),
        waits: true,
        ..vm(name)
    };
    let normal = [missing("less", Class::Normal, 100), missing("more", Class::Normal, 300)];
    let vms = [normal.to_vec(), vec![missing("latency", Class::Latency, 100)]].concat();
    // 608 MiB are to be available.
    let decisions = once(400, &vms);
    assert_eq!(limits(&decisions), [("less", Some(3072 - 156)), ("more", Some(3072 - 52))]);
    let why = &decisions[0].why;
    assert!(why.starts_with("its part of what the host needs to live: has 3 GiB"), "{why}");
    let with_batch = [vms, vec![missing("batch", Class::Batch, 100)]].concat();
    // It gives enough for all.
    let decisions = once(400, &with_batch);
    let lowered: Vec<_> =
        { limits(&decisions).into_iter() }.filter(|(_, limit)| *limit < Some(3072)).collect();
    assert_eq!(lowered, [("batch", Some(3072 - 683))]);
    let latency = [missing("latency", Class::Latency, 100)];
    assert_eq!(limits(&once(400, &latency)), [("latency", Some(3072 - 208))]);
}

#[test]
fn a_vm_of_less_weight_gives_more() {
    let of = |name, weight| VmSight { rule: VmRule { weight, ..VmRule::default() }, ..vm(name) };
    let mut pilot = Pilot::default();
    pilot.look(Duration::ZERO, RULE, &memory(1000), &[]);
    let now = Duration::from_secs(1);
    let decisions = pilot.look(now, RULE, &memory(2432 - 60), &[of("less", 100), of("more", 200)]);
    assert_eq!(limits(&decisions), [("less", Some(3072 - 40)), ("more", Some(3072 - 20))]);
}

#[test]
fn nobody_goes_below_its_minimum_or_above_its_maximum() {
    let rule = VmRule { min_bytes: Some(3060 * MIB), ..VmRule::default() };
    assert_eq!(limits(&once(100, &[VmSight { rule, ..vm("min") }])), []);
    let rule = VmRule { max_bytes: Some(2000 * MIB), ..VmRule::default() };
    let max = VmSight { rule, ..vm("max") };
    let decisions = once(8192, from_ref(&max));
    assert_eq!(limits(&decisions), [("max", Some(3072 - 164))], "by and by");
    assert_eq!(decisions[0].why, "it may have 1.9 GiB at most");
    let limited = VmSight { limit_bytes: Some(2000 * MIB), ..max };
    assert_eq!(once(8192, &[limited]), [], "it stays there");
}

#[test]
fn a_held_vm_stays_as_it_is() {
    let rule = VmRule { is_held: true, max_bytes: Some(1), ..VmRule::default() };
    let held = VmSight { rule, spare_bytes: 1024 * MIB, waits: true, ..vm("held") };
    assert_eq!(once(100, &[held]), []);
}

#[test]
fn a_vm_that_misses_its_memory_is_relieved_at_once() {
    let mut pilot = Pilot::default();
    let limited =
        VmSight { limit_bytes: Some(2048 * MIB), resident_bytes: 2000 * MIB, ..vm("web") };
    let host = memory(2000);
    pilot.look(Duration::ZERO, RULE, &host, from_ref(&limited));
    let missing = VmSight { refaulted_bytes: 50 * MIB, ..limited };
    let decisions = pilot.look(Duration::from_secs(1), RULE, &host, from_ref(&missing));
    assert_eq!(limits(&decisions), [("web", Some(2048 + 256))], "a 16th of its memory");
    assert_eq!(decisions[0].why, "50 MiB of evicted memory came back within seconds");
    // Its limit rests.
    let relieved = VmSight { limit_bytes: Some(2304 * MIB), resident_bytes: 2296 * MIB, ..missing };
    let later = |pilot: &mut Pilot, seconds| {
        pilot.look(Duration::from_secs(seconds), RULE, &host, from_ref(&relieved))
    };
    assert_eq!(later(&mut pilot, 5), []);
    assert_eq!(limits(&later(&mut pilot, 6)).len(), 1, "it has cold memory");
}

#[test]
fn a_vm_is_relieved_between_two_looks_and_nothing_is_taken() {
    let (mut pilot, host) = (Pilot::default(), memory(1030));
    let vms = |refaulted_mib| {
        let limited = VmSight {
            limit_bytes: Some(2048 * MIB),
            resident_bytes: 2000 * MIB,
            refaulted_bytes: refaulted_mib * MIB,
            ..vm("web")
        };
        let idle = VmSight { working_bytes: Some(512 * MIB), spare_bytes: 512 * MIB, ..vm("idle") };
        [limited, idle]
    };
    let decisions = pilot.look(Duration::ZERO, RULE, &host, &vms(0));
    assert!(decisions.iter().any(|decision| decision.vm == "idle"), "it gives: {decisions:?}");
    let mut relieve = |milliseconds, refaulted_mib| {
        let now = Duration::from_millis(milliseconds);
        let decisions = pilot.relieve(now, RULE, &host, &vms(refaulted_mib));
        decisions.iter().map(|decision| decision.vm.clone()).collect::<Vec<_>>()
    };
    // It may miss a 500th of 2000 MiB in a second.
    assert_eq!(relieve(200, 3), [""; 0]);
    assert_eq!(relieve(400, 5), ["web"], "what it misses adds up");
    assert_eq!(relieve(600, 8), [""; 0], "what it has missed counts once");
    assert_eq!(relieve(800, 10), ["web"]);
    assert_eq!(relieve(900, 50), [""; 0], "what the host has was given since the last whole look");
}

#[test]
fn a_look_in_between_takes_nothing_from_the_next_ones_judgement() {
    let (mut pilot, host) = (Pilot::default(), memory(900));
    // A batch VM gets nothing of less than the reserve, and is cold by its working set.
    let vm = |refaulted_mib| VmSight {
        limit_bytes: Some(2048 * MIB),
        resident_bytes: 2000 * MIB,
        refaulted_bytes: refaulted_mib * MIB,
        ..of_class("batch", Class::Batch)
    };
    pilot.look(Duration::ZERO, RULE, &host, from_ref(&vm(0)));
    let now = Duration::from_millis(950);
    assert_eq!(pilot.relieve(now, RULE, &host, from_ref(&vm(100))), []);
    let decisions = pilot.look(Duration::from_secs(1), RULE, &host, from_ref(&vm(101)));
    assert_eq!(limits(&decisions), [], "it misses memory");
}

#[test]
fn a_guests_word_counts_if_what_it_misses_bears_it_out() {
    let guest = |available_mib| {
        Some(MemoryFigures { total_bytes: 4096 * MIB, available_bytes: available_mib * MIB })
    };
    let limited = |available_mib, refaulted_mib| VmSight {
        limit_bytes: Some(2048 * MIB),
        resident_bytes: 2040 * MIB,
        guest: guest(available_mib),
        refaulted_bytes: refaulted_mib * MIB,
        ..vm("web")
    };
    let mut pilot = Pilot::default();
    let mut look = |seconds, vm: &VmSight| {
        pilot.look(Duration::from_secs(seconds), RULE, &memory(2000), from_ref(vm))
    };
    assert_eq!(limits(&look(0, &limited(0, 0))), [("web", Some(2040 - 41))], "it has cold memory");
    // Half of a sixteenth is the border.
    let decisions = look(1, &limited(127, 1));
    assert_eq!(limits(&decisions), [("web", Some(2048 + 256))]);
    let why = "its guest is short of memory, with 127 MiB of 4 GiB available, and 1 MiB came back \
               within seconds";
    assert_eq!(decisions[0].why, why);
    assert_eq!(look(5, &limited(127, 2)), [], "the limit rests");
    assert_eq!(limits(&look(6, &limited(127, 3))), [("web", Some(2048 + 256))]);
    assert_eq!(limits(&look(20, &limited(128, 4))), [("web", Some(2040 - 41))]);
    // A limit that leaves room is not what the guest lacks.
    let roomy = VmSight { resident_bytes: 1500 * MIB, ..limited(0, 5) };
    assert_eq!(limits(&look(40, &roomy)), [("web", Some(1500 - 41))]);
}

#[test]
fn nobody_gets_what_batch_vms_do_not_give_while_the_swap_files_are_full() {
    let rule = HostRule { swap_max_bytes: Some(MIB), ..RULE };
    let batch = of_class("batch", Class::Batch);
    let limited = |name: &str| VmSight {
        limit_bytes: Some(2048 * MIB),
        resident_bytes: 2048 * MIB,
        ..vm(name)
    };
    let host = memory(300);
    let raised = |swap_bytes| {
        let mut pilot = Pilot::default();
        let host = HostSight { memory: &host, swap_bytes };
        pilot.look(Duration::ZERO, rule, host, &[batch.clone(), limited("web")]);
        let missing = VmSight { refaulted_bytes: 50 * MIB, ..limited("web") };
        let decisions = pilot.look(Duration::from_secs(1), rule, host, &[batch.clone(), missing]);
        limits(&decisions).iter().any(|(name, to)| *name == "web" && *to > Some(2048))
    };
    assert!(raised(0) && !raised(MIB));
}

#[test]
fn a_limit_that_was_too_low_rests_longer_each_time() {
    let (mut state, limited) =
        (VmState::default(), VmSight { limit_bytes: Some(4096 * MIB), ..vm("web") });
    let mut now = Duration::from_secs(1);
    for rest in [5, 10, 20, 40, 80, 160, 300, 300] {
        let rest = Duration::from_secs(rest);
        state.lowered(now);
        state.note(&limited, now);
        state.relieved(now);
        // It is blamed once.
        state.relieved(now);
        let last = now + rest - Duration::from_nanos(1);
        assert!(!state.may_lower(&limited, last, false));
        assert_eq!(state.may_lower(&limited, last, true), rest > Duration::from_secs(30));
        now += rest;
        assert!(state.may_lower(&limited, now, false));
    }
}

#[test]
fn what_a_vm_does_not_give_does_not_count() {
    let mut pilot = Pilot::default();
    let stuck = VmSight { limit_bytes: Some(1024 * MIB), ..vm("stuck") };
    let look = |pilot: &mut Pilot, seconds| {
        let vms = [stuck.clone(), vm("other")];
        limits(&pilot.look(Duration::from_secs(seconds), RULE, &memory(900), &vms)).len()
    };
    assert_eq!(look(&mut pilot, 0), 0, "it is about to give 2 GiB");
    assert_eq!(
        look(&mut pilot, 5),
        1,
        "it did not, so the other one gives, and it is asked no more"
    );
}

#[test]
fn a_guest_that_lies_about_free_memory_keeps_nobody_from_giving() {
    let mut pilot = Pilot::default();
    let liar = VmSight { spare_bytes: 3000 * MIB, ..vm("liar") };
    let look = |pilot: &mut Pilot, seconds| {
        let vms = [liar.clone(), vm("other")];
        limits(&pilot.look(Duration::from_secs(seconds), RULE, &memory(900), &vms)).len()
    };
    assert_eq!(look(&mut pilot, 0), 0, "it is to give 3000 MiB");
    assert_eq!(look(&mut pilot, 3), 1, "nothing came, so the other one gives");
}

#[test]
fn nothing_in_use_is_taken_while_the_swap_files_are_full() {
    let (rule, host) = (HostRule { swap_max_bytes: Some(1600), ..RULE }, memory(400));
    let mut pilot = Pilot::default();
    let bounded = VmRule { max_bytes: Some(2000 * MIB), ..VmRule::default() };
    let vms = [
        VmSight { spare_bytes: 100 * MIB, ..vm("free") },
        of_class("batch", Class::Batch),
        VmSight { rule: bounded, ..vm("bounded") },
    ];
    let mut look = |seconds, swap_bytes| {
        let host = HostSight { memory: &host, swap_bytes };
        limits(&pilot.look(Duration::from_secs(seconds), rule, host, &vms)).len()
    };
    assert_eq!([look(0, 1600), look(5, 1501)], [0, 0], "until a sixteenth of the quota is free");
    assert_eq!([look(10, 1499), look(15, 1599)], [2, 2], "one gives free memory");
    assert_eq!(look(20, u64::MAX), 0);
}

#[test]
fn relief_leaves_half_of_the_reserve_to_the_host() {
    let missing = |name, class| {
        let limit_bytes = Some(2048 * MIB);
        VmSight { limit_bytes, resident_bytes: 2000 * MIB, waits: true, ..of_class(name, class) }
    };
    let vms = [missing("normal", Class::Normal), missing("latency", Class::Latency)];
    // An eighth of its memory, and what is left for a 16th.
    assert_eq!(
        limits(&once(512 + 600, &vms)),
        [("latency", Some(2048 + 512)), ("normal", Some(2048 + 88))]
    );
    assert_eq!(limits(&once(512, &vms)), []);
}

#[test]
fn limits_go_up_again_once_the_host_has_enough() {
    let limited = |class, name| VmSight {
        limit_bytes: Some(2048 * MIB),
        resident_bytes: 2000 * MIB,
        ..of_class(name, class)
    };
    let vms = [limited(Class::Batch, "batch"), limited(Class::Latency, "latency")];
    let decisions = once(3000, &vms);
    // An eighth of what is beyond the goal.
    assert_eq!(limits(&decisions), [("latency", Some(2048 + 71))]);
    let near = VmSight { limit_bytes: Some(4090 * MIB), ..vm("near") };
    assert_eq!(limits(&once(8192, &[near])), [("near", None)], "its memory is all");
}

#[test]
fn those_get_memory_first_that_have_least_for_their_weight() {
    let limited = |name, weight, mib| VmSight {
        rule: VmRule { weight, ..VmRule::default() },
        limit_bytes: Some(mib * MIB),
        resident_bytes: mib * MIB,
        ..vm(name)
    };
    // 10.2, 10 and 20 MiB for each hundredth.
    let vms = [limited("a", 100, 1020), limited("b", 200, 2000), limited("c", 100, 2000)];
    assert_eq!(limits(&once(2432 + 8 * 140, &vms)), [("b", Some(2000 + 128))]);
    let missing = vms.map(|vm| VmSight { waits: true, ..vm });
    assert_eq!(
        limits(&once(512 + 300, &missing)),
        [("b", Some(2000 + 256)), ("a", Some(1020 + 44))]
    );
}

#[test]
fn what_is_on_its_way_is_not_asked_for_again() {
    let mut pilot = Pilot::default();
    pilot.look(Duration::ZERO, RULE, &memory(2000), &[]);
    let under_way = VmSight { limit_bytes: Some(2600 * MIB), ..vm("slow") };
    let decisions =
        pilot.look(Duration::from_secs(1), RULE, &memory(2000), &[under_way, vm("other")]);
    assert_eq!(decisions, []);
}
