//! Memory that guests unplug while the host is short, and get back before they need it.

use super::*;

/// A VM of 4 GiB that no limit reaches. It had 2 GiB plugged, of which `unplugged_mib` are gone, and
/// all of its memory is resident.
fn plugged(name: &str, unplugged_mib: u64, available_mib: u64) -> VmSight {
    let memory_bytes = (4096 - unplugged_mib) * MIB;
    let bytes = (2048 - unplugged_mib) * MIB;
    let plugged = PluggedSight {
        bytes,
        asked_bytes: bytes,
        full_bytes: 2048 * MIB,
        block_bytes: 2 * MIB,
        may_unplug: true,
    };
    let available_bytes = available_mib * MIB;
    VmSight {
        memory_bytes,
        resident_bytes: memory_bytes,
        plugged: Some(plugged),
        guest: Some(MemoryFigures { total_bytes: memory_bytes, available_bytes }),
        may_limit: false,
        ..vm(name)
    }
}

/// The VM with other plugged memory.
fn with(vm: &VmSight, change: impl FnMut(&mut PluggedSight)) -> VmSight {
    let mut vm = vm.clone();
    vm.plugged.iter_mut().for_each(change);
    vm
}

/// What is to be plugged from now on, in MiB.
fn plugs(decisions: &[Decision]) -> Vec<(&str, u64)> {
    let plug = |decision: &'_ Decision| match decision.action {
        Action::Plug { to, .. } => Some(to / MIB),
        _ => None,
    };
    decisions.iter().filter_map(|decision| Some((&*decision.vm, plug(decision)?))).collect()
}

/// Looks at a host with so much available at that second. Returns what is to be plugged.
fn look(pilot: &mut Pilot, seconds: u64, available_mib: u64, vms: &[VmSight]) -> Vec<u64> {
    let decisions = pilot.look(Duration::from_secs(seconds), RULE, &memory(available_mib), vms);
    plugs(&decisions).into_iter().map(|(_, mib)| mib).collect()
}

#[test]
fn a_short_host_has_guests_unplug_what_they_can_spare() {
    // 256 MiB stay available in it. A 25th of its memory goes in a second, in whole blocks.
    let decisions = once(900, &[plugged("web", 0, 1000)]);
    assert_eq!(plugs(&decisions), [("web", 2048 - 162)]);
    let why = "its guest can spare 744 MiB; the host is short: ";
    assert!(decisions[0].why.starts_with(why), "{decisions:?}");
    // Half of what it can spare.
    assert_eq!(plugs(&once(900, &[plugged("web", 0, 256 + 100)])), [("web", 2048 - 50)]);
    assert_eq!(plugs(&once(900, &[plugged("web", 0, 256)])), []);
    assert_eq!(plugs(&once(1100, &[plugged("web", 0, 1000)])), [], "the host is tight");
}

#[test]
fn guests_unplug_no_more_than_the_host_lacks() {
    // 1216 MiB are to be available.
    let vms = ["a", "b", "c"].map(|name| plugged(name, 0, 3000));
    assert_eq!(plugs(&once(900, &vms)), [("c", 2048 - 162), ("b", 2048 - 154)]);
    // What a guest is about to unplug counts for some time.
    let mut pilot = Pilot::default();
    let [slow, other, _] = vms;
    assert_eq!(look(&mut pilot, 0, 900, from_ref(&slow)), [2048 - 162]);
    let slow = with(&slow, |it| it.asked_bytes -= 162 * MIB);
    let both = [slow, other];
    assert_eq!(look(&mut pilot, 1, 900, &both), [2048 - 154], "the other one gives the rest");
}

#[test]
fn a_slow_guest_keeps_nobody_from_giving() {
    let (mut pilot, slow) = (Pilot::default(), plugged("slow", 0, 3000));
    assert_eq!(look(&mut pilot, 0, 900, from_ref(&slow)), [2048 - 162]);
    let mut slow = with(&slow, |it| it.asked_bytes -= 162 * MIB);
    for second in 1..5 {
        // A block each second is progress, but no reason to wait.
        slow = with(&slow, |it| it.bytes -= 2 * MIB);
        assert_eq!(look(&mut pilot, second, 900, from_ref(&slow)), [0; 0]);
    }
    let both = [slow, plugged("other", 0, 3000)];
    assert_eq!(look(&mut pilot, 5, 900, &both), [2048 - 162], "the other one gives all");
    // What somebody else has asked for does not count at all.
    let (mut pilot, web) = (Pilot::default(), plugged("web", 0, 3000));
    let shrinks = with(&web, |it| (it.asked_bytes, it.full_bytes) = (0, 0));
    assert_eq!(look(&mut pilot, 0, 900, &[shrinks, plugged("other", 0, 3000)]), [2048 - 162]);
}

#[test]
fn what_is_faster_comes_first() {
    let web = plugged("web", 0, 1000);
    assert_eq!(plugs(&once(400, from_ref(&web))), [("web", 2048 - 162)], "critical");
    // The other one gives a sixth of its memory.
    assert_eq!(plugs(&once(400, &[web.clone(), vm("other")])), [("web", 2048 - 132)]);
    let limited = VmSight { may_limit: true, ..web.clone() };
    assert_eq!(plugs(&once(900, from_ref(&limited))), [], "a limit reaches it");
    let free = VmSight { spare_bytes: 100 * MIB, ..web };
    let mut pilot = Pilot::default();
    for second in 0..3 {
        assert_eq!(look(&mut pilot, second, 900, from_ref(&free)), [0; 0], "free memory first");
    }
    // With full swap files there is no other way.
    let (rule, host) = (HostRule { swap_max_bytes: Some(MIB), ..RULE }, memory(900));
    let host = HostSight { memory: &host, swap_bytes: MIB };
    let decisions = Pilot::default().look(Duration::ZERO, rule, host, &[limited]);
    assert_eq!(plugs(&decisions), [("web", 2048 - 162)]);
}

#[test]
fn what_ebb_does_not_see_is_unplugged_before_it_is_written() {
    let unseen = VmSight { may_reclaim: false, may_limit: true, ..plugged("web", 0, 1000) };
    for (available, mib) in [(2000, 40), (900, 162)] {
        let decisions = once(available, from_ref(&unseen));
        assert_eq!(plugs(&decisions), [("web", 2048 - mib)]);
        assert_eq!(limits(&decisions), []);
    }
    let decisions = once(400, from_ref(&unseen));
    assert_eq!((plugs(&decisions).len(), limits(&decisions).len()), (0, 1), "what is faster");
    assert_eq!(once(8192, from_ref(&unseen)), [], "the host has enough");
    // It has some time for it. Then it gives by a limit.
    let mut pilot = Pilot::default();
    let mut limited = |second, vm: &VmSight| {
        let now = Duration::from_secs(second);
        let decisions = pilot.look(now, RULE, &memory(2000), from_ref(vm));
        limits(&decisions).len()
    };
    assert_eq!(limited(0, &unseen), 0);
    let slow = with(&unseen, |it| it.asked_bytes -= 40 * MIB);
    assert_eq!([limited(1, &slow), limited(4, &slow), limited(5, &slow)], [0, 0, 1]);
}

#[test]
fn who_cannot_spare_it_is_not_asked() {
    let web = plugged("web", 0, 1000);
    let rule = |min_mib: u64| VmRule { min_bytes: Some(min_mib * MIB), ..VmRule::default() };
    let cases = [
        ("it says nothing", VmSight { guest: None, ..web.clone() }),
        ("it cannot", with(&web, |it| it.may_unplug = false)),
        ("its minimum", VmSight { rule: rule(4090), ..web.clone() }),
        ("it is held", VmSight { rule: VmRule { is_held: true, ..rule(0) }, ..web.clone() }),
        ("it waits for room", VmSight { waits: true, ..web.clone() }),
        ("it is on its way", with(&web, |it| it.asked_bytes -= 50 * MIB)),
        ("it has yet to plug", with(&web, |it| it.bytes -= 50 * MIB)),
        ("it is not resident", VmSight { resident_bytes: 3300 * MIB, ..web.clone() }),
        ("its block is larger", with(&web, |it| it.block_bytes = 1024 * MIB)),
    ];
    for (why, vm) in cases {
        assert_eq!(plugs(&once(900, &[vm])), [], "{why}");
    }
    let least = VmSight { rule: rule(4000), ..web };
    assert_eq!(plugs(&once(900, &[least])), [("web", 2048 - 96)]);
}

#[test]
fn a_guest_gets_memory_back_before_it_needs_it() {
    // A 16th of its memory is its reserve, and half of that the border of its need.
    for available in [100, 900, 2000, 8192] {
        for may_limit in [false, true] {
            let web = |mib| VmSight { may_limit, ..plugged("web", 1024, mib) };
            let decisions = once(available, &[web(191)]);
            assert_eq!(plugs(&decisions), [("web", 1024 + 192)], "{available}: {decisions:?}");
            let why = "its guest can spare nothing: 191 MiB of 3 GiB available";
            assert_eq!(decisions[0].why, why);
            assert_eq!(plugs(&once(available, &[web(95)])), [("web", 2048)]);
        }
    }
    let web = plugged("web", 1024, 191);
    let mut pilot = Pilot::default();
    let decisions = pilot.relieve(Duration::ZERO, RULE, &memory(100), from_ref(&web));
    assert_eq!(plugs(&decisions), [("web", 1216)], "between two looks, too");
    let coming = with(&web, |it| it.asked_bytes += 192 * MIB);
    assert_eq!(plugs(&once(900, &[coming])), [], "it is on its way");
    let waiting = VmSight { waits: true, ..web.clone() };
    assert_eq!(plugs(&once(900, &[waiting])), [], "QEMU answers nobody");
    let rule = VmRule { min_bytes: Some(3500 * MIB), ..VmRule::default() };
    let raised = VmSight { rule, ..plugged("web", 1024, 1000) };
    assert_eq!(plugs(&once(2000, &[raised])), [("web", 1216)]);
    let rule = VmRule { is_held: true, ..VmRule::default() };
    let held = VmSight { rule, ..plugged("web", 1024, 1000) };
    assert_eq!(plugs(&once(2000, &[held])), [("web", 2048)]);
}

#[test]
fn a_guest_that_goes_silent_gets_all_back() {
    let mut pilot = Pilot::default();
    assert_eq!(look(&mut pilot, 0, 2000, &[plugged("web", 1024, 1000)]), [0; 0]);
    let silent = [VmSight { guest: None, ..plugged("web", 1024, 0) }];
    assert_eq!(look(&mut pilot, 29, 2000, &silent), [0; 0]);
    assert_eq!(look(&mut pilot, 30, 2000, &silent), [2048]);
}

#[test]
fn a_guest_rests_once_it_has_memory_back() {
    let mut pilot = Pilot::default();
    assert_eq!(look(&mut pilot, 0, 900, &[plugged("web", 1024, 191)]), [1216]);
    let web = [plugged("web", 832, 1000)];
    assert_eq!(look(&mut pilot, 1, 900, &web), [0; 0]);
    assert_eq!(look(&mut pilot, 300, 900, &web), [0; 0]);
    assert_eq!(look(&mut pilot, 301, 900, &web), [1216 - 130]);
}

#[test]
fn what_somebody_else_changed_rests() {
    let mut pilot = Pilot::default();
    let before = plugged("web", 0, 1000);
    assert_eq!(look(&mut pilot, 0, 2000, &[before]), [0; 0]);
    let changed = [with(&plugged("web", 512, 1000), |it| it.full_bytes = it.bytes)];
    assert_eq!(look(&mut pilot, 1, 900, &changed), [0; 0]);
    assert_eq!(look(&mut pilot, 301, 900, &changed).len(), 1);
}

#[test]
fn who_unplugs_what_brings_nothing_rests() {
    let mut pilot = Pilot::default();
    assert_eq!(look(&mut pilot, 0, 900, &[plugged("web", 0, 1000)]), [1886]);
    assert_eq!(look(&mut pilot, 1, 900, &[plugged("web", 162, 1000)]).len(), 1, "it was worth it");
    let vain = [VmSight { resident_bytes: 3920 * MIB, ..plugged("web", 318, 1000) }];
    assert_eq!(look(&mut pilot, 2, 900, &vain), [0; 0]);
    assert_eq!(look(&mut pilot, 301, 900, &vain), [0; 0]);
    assert_eq!(look(&mut pilot, 302, 900, &vain).len(), 1);
}

#[test]
fn a_host_that_has_enough_gives_back_what_was_unplugged() {
    let decisions = once(8192, &[plugged("web", 1024, 1000)]);
    assert_eq!(plugs(&decisions), [("web", 1024 + 96)]);
    assert!(decisions[0].why.starts_with("the host is ample: "), "{decisions:?}");
    assert_eq!(plugs(&once(8192, &[plugged("web", 2, 1000)])), [("web", 2048)]);
    assert_eq!(plugs(&once(8192, &[plugged("web", 0, 1000)])), []);
    assert_eq!(plugs(&once(2000, &[plugged("web", 1024, 1000)])), [], "tight");
    let big = with(&plugged("web", 1024, 1000), |it| it.block_bytes = 1024 * MIB);
    assert_eq!(plugs(&once(8192, &[big])), [("web", 2048)], "a block at least");
}
