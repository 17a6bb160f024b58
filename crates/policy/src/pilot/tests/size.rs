//! Memory that guests unplug while the host is short, and get back before they need it.

use super::*;

/// A VM of 2 GiB that has 2 GiB plugged, of which `unplugged_mib` are gone, and can use so much.
fn plugged(name: &str, unplugged_mib: u64, available_mib: u64) -> VmSight {
    let target_bytes = (4096 - unplugged_mib) * MIB;
    let size = SizeSight {
        bytes: target_bytes,
        target_bytes,
        full_bytes: 4096 * MIB,
        base_bytes: 2048 * MIB,
        block_bytes: 2 * MIB,
    };
    let total_bytes = target_bytes;
    let guest = Some(MemoryFigures { total_bytes, available_bytes: available_mib * MIB });
    // Nothing of it is cold.
    let (size, working_bytes) = (Some(size), Some(3072 * MIB));
    VmSight { size, guest, working_bytes, memory_bytes: target_bytes, ..vm(name) }
}

fn sizes(decisions: &[Decision]) -> Vec<(&str, u64)> {
    let size = |decision: &'_ Decision| match decision.action {
        Action::Resize { to, .. } => Some(to / MIB),
        _ => None,
    };
    decisions.iter().filter_map(|it| Some((&*it.vm, size(it)?))).collect()
}

#[test]
fn a_short_host_has_guests_unplug_what_they_can_spare() {
    // 256 MiB stay available in it. A 25th of its memory goes in a second, in whole blocks.
    let decisions = once(900, &[plugged("web", 0, 1000), vm("other")]);
    assert_eq!(sizes(&decisions), [("web", 4096 - 162)], "{decisions:?}");
    let why = &decisions.iter().find(|it| it.vm == "web").unwrap().why;
    assert!(why.starts_with("its guest can spare 744 MiB of 4 GiB; the host is short"), "{why}");
    // Half of what it can spare.
    assert_eq!(sizes(&once(900, &[plugged("web", 0, 256 + 100)])), [("web", 4096 - 50)]);
    assert_eq!(sizes(&once(900, &[plugged("web", 0, 256)])), []);
    assert_eq!(sizes(&once(2000, &[plugged("web", 0, 1000)])), [], "tight");
    let silent = VmSight { guest: None, ..plugged("web", 0, 1000) };
    assert_eq!(sizes(&once(900, &[silent])), [], "it does not say what it can spare");
}

#[test]
fn no_guest_goes_below_its_minimum_or_what_it_began_with() {
    let least = |min_mib: u64| VmSight {
        rule: VmRule { min_bytes: Some(min_mib * MIB), ..VmRule::default() },
        ..plugged("web", 0, 3000)
    };
    assert_eq!(sizes(&once(900, &[least(4001)])), [("web", 4002)]);
    assert_eq!(sizes(&once(900, &[least(4096)])), []);
    assert_eq!(sizes(&once(900, &[plugged("web", 2048, 1000)])), [], "there is nothing plugged");
    assert_eq!(sizes(&once(900, &[plugged("web", 2046, 1000)])), [("web", 2048)]);
}

#[test]
fn the_next_step_waits_for_the_last_one() {
    let mut slow = plugged("web", 100, 1000);
    slow.size.as_mut().unwrap().bytes += 50 * MIB;
    assert_eq!(sizes(&once(900, &[slow])), []);
}

#[test]
fn a_guest_gets_memory_back_before_it_needs_it() {
    // A 16th of its memory is its reserve, and half of that the border of its need.
    for available in [900, 2000, 8192] {
        let decisions = once(available, &[plugged("web", 1024, 191)]);
        assert_eq!(sizes(&decisions), [("web", 3072 + 96)], "{available}: {decisions:?}");
        let why = &decisions[0].why;
        assert_eq!(why, "its guest can spare nothing: 191 MiB of 3 GiB available");
        assert_eq!(sizes(&once(available, &[plugged("web", 1024, 95)])), [("web", 4096)]);
    }
    assert_eq!(sizes(&once(2000, &[plugged("web", 1024, 193)])), []);
    // Then nothing is asked of it for a while.
    let mut pilot = Pilot::default();
    let mut look = |seconds, available_mib| {
        let vms = [plugged("web", 1024, available_mib)];
        let decisions = pilot.look(Duration::from_secs(seconds), RULE, &memory(900), &vms);
        sizes(&decisions).iter().map(|(_, mib)| *mib).collect::<Vec<u64>>()
    };
    assert_eq!(look(0, 191), [3168]);
    assert_eq!(look(299, 1000), []);
    assert_eq!(look(300, 1000).len(), 1);
}

#[test]
fn a_host_that_has_enough_gives_back_what_was_unplugged() {
    assert_eq!(sizes(&once(8192, &[plugged("web", 1024, 1000)])), [("web", 3072 + 96)]);
    assert_eq!(sizes(&once(8192, &[plugged("web", 2, 1000)])), [("web", 4096)]);
    assert_eq!(sizes(&once(8192, &[plugged("web", 0, 1000)])), []);
    let rule = VmRule { min_bytes: Some(3500 * MIB), ..VmRule::default() };
    let raised = VmSight { rule, ..plugged("web", 1024, 1000) };
    assert_eq!(sizes(&once(2000, &[raised])), [("web", 3500)], "its rule asks for it");
}
