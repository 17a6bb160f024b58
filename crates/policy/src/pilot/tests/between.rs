//! Relief between two seconds, and what it takes from others.

use proptest::prelude::*;

use super::*;

const LIMIT: u64 = 2048 * MIB;

/// A VM below its limit, to which so much has come back.
fn missing(name: &str, class: Class, refaulted_mib: u64) -> VmSight {
    VmSight {
        limit_bytes: Some(LIMIT),
        resident_bytes: 2000 * MIB,
        refaulted_bytes: refaulted_mib * MIB,
        ..of_class(name, class)
    }
}

#[test]
fn a_batch_vm_is_relieved_between_two_looks_by_its_part() {
    // A quarter of what is beyond the reserve is 100 MiB.
    let (mut pilot, host) = (Pilot::default(), memory(1024 + 400));
    let vm = |limit_mib, refaulted_mib| VmSight {
        limit_bytes: Some(limit_mib * MIB),
        ..missing("batch", Class::Batch, refaulted_mib)
    };
    pilot.look(Duration::ZERO, RULE, &host, from_ref(&vm(2048, 0)));
    let mut relieve = |milliseconds, vm: &VmSight| {
        let now = Duration::from_millis(milliseconds);
        pilot.relieve(now, RULE, &host, from_ref(vm))
    };
    // It may miss a hundredth of 2000 MiB in a second.
    assert_eq!(relieve(100, &vm(2048, 20)), []);
    assert_eq!(limits(&relieve(200, &vm(2048, 30))), [("batch", Some(2048 + 100))]);
    assert_eq!(relieve(400, &vm(2148, 60)), [], "it has had its part of this second");
    let decisions = pilot.look(Duration::from_secs(1), RULE, &host, from_ref(&vm(2148, 60)));
    assert_eq!(limits(&decisions), [("batch", Some(2148 + 100))], "the next second's");
}

#[test]
fn cold_memory_goes_faster_while_somebody_misses_more_than_there_is() {
    let taken = |refaulted_mib| {
        let (mut pilot, host) = (Pilot::default(), memory(1500));
        let vms = |refaulted_mib| [missing("web", Class::Normal, refaulted_mib), vm("idle")];
        pilot.look(Duration::ZERO, RULE, &host, &vms(0));
        let decisions = pilot.look(Duration::from_secs(1), RULE, &host, &vms(refaulted_mib));
        let idle = limits(&decisions).into_iter().find(|(name, _)| *name == "idle");
        idle.and_then(|(_, limit)| limit).map(|limit| 3072 - limit)
    };
    // The host has 988 MiB above half of the reserve.
    assert_eq!([taken(0), taken(240)], [Some(41); 2], "a hundredth of its memory");
    assert_eq!(taken(250), Some(164), "a 25th");
}

proptest! {
    /// However often they are looked at, and whichever of them misses memory.
    #[test]
    fn batch_vms_get_their_part_once_a_second(
        available_mib in 0u64..8192,
        missed in proptest::collection::vec((0usize..3, 0u64..500), 1..10),
    ) {
        let (mut pilot, host) = (Pilot::default(), memory(available_mib));
        let mut vms = ["a", "b", "c"].map(|name| missing(name, Class::Batch, 0));
        pilot.look(Duration::ZERO, RULE, &host, &vms);
        for (number, (vm, mib)) in (1..).zip(missed) {
            vms[vm].refaulted_bytes += mib * MIB;
            let now = Duration::from_millis(90 * number);
            for decision in pilot.relieve(now, RULE, &host, &vms) {
                let Action::Limit { to, .. } = decision.action else { panic!("{decision}") };
                let vm = vms.iter_mut().find(|vm| vm.name == decision.vm).expect("a VM");
                prop_assert!(vm.limit_bytes < to.or(Some(vm.memory_bytes)), "{decision}");
                vm.limit_bytes = to.or(Some(vm.memory_bytes));
            }
        }
        let limits = vms.iter().filter_map(|vm| vm.limit_bytes);
        let given: u64 = limits.map(|limit| limit - LIMIT).sum();
        let part = available_mib.saturating_sub(1024) * MIB / 4;
        prop_assert!(given <= part, "{} of {} MiB", given / MIB, part / MIB);
    }
}
