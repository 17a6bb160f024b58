//! VMs of libvirt, as Debian ships it.

use ebb_api::{DiscoveredVm, ObservedVm};
use vmtest::{Domain, Guest, Host, Libvirt, Monitors, Vm, has_time, require, rounds, until};

const MIB: u64 = 1 << 20;
const MEMFD: &str = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";

fn guest() -> Guest {
    Guest::debian("6.1-cloud").memory("512M").cpus(1)
}

fn discovered(host: &Host, domain: &Domain<'_>) -> DiscoveredVm {
    let text = host.ebb("discover --json").ok();
    let all: Vec<DiscoveredVm> = serde_json::from_str(&text).expect("a list");
    let found = all.into_iter().find(|vm| vm.pid == domain.vm.pid());
    let found = found.unwrap_or_else(|| panic!("{text}"));
    assert_eq!(found.manager.as_deref(), Some("libvirt"));
    assert_eq!(found.name.as_deref(), Some(domain.name()));
    assert_eq!(found.uuid.as_deref(), Some(domain.virsh("domuuid", &[]).trim()));
    found
}

/// One test, since libvirt takes most of a minute to start.
#[test]
fn domains_are_managed_or_say_what_to_change() {
    let libvirt = Libvirt::new();
    require!(libvirt.as_ref());
    let libvirt = libvirt.expect("libvirt");
    is_managed_through_libvirt(&libvirt);
    says_what_to_change(&libvirt);
    is_managed_by_a_second_monitor(&libvirt);
}

/// A domain exactly as libvirt starts it.
fn is_managed_through_libvirt(libvirt: &Libvirt) {
    let host = Host::new();
    let mut domain = host.domain(libvirt, guest(), MEMFD, Monitors::Libvirts);
    goes_and_comes_back(&host, &domain, Vm::attach_as_found);
    is_reset_in_the_middle(&domain);
    bears_a_libvirt_that_hangs_or_ends(libvirt, &domain);
    is_saved_and_restored(&mut domain);
    let vm = &domain.vm;
    vm.detach();
    assert_eq!(vm.guest("check kept"), "0");
    assert!(domain.virsh("domstate", &[]).contains("running"));
    // The test's guest does not mind its power button.
    domain.virsh("shutdown", &[]);
    vm.power_off();
}

fn is_managed_by_a_second_monitor(libvirt: &Libvirt) {
    require!(has_time("a minute for a domain with a second monitor: cargo xtask soak libvirt"));
    let host = Host::new();
    let domain = host.domain(libvirt, guest(), MEMFD, Monitors::Own);
    goes_and_comes_back(&host, &domain, Vm::attach);
    let vm = &domain.vm;
    host.kill9();
    host.start();
    assert_eq!(vm.guest("check kept"), "0");
    vm.detach();
    assert_eq!(vm.guest("check kept"), "0");
    assert!(domain.virsh("domstate", &[]).contains("running"));
}

/// Discovers, observes and attaches a domain, takes its free memory, and sets a limit.
fn goes_and_comes_back(host: &Host, domain: &Domain<'_>, attach: fn(&Vm)) {
    let vm = &domain.vm;
    assert_eq!(discovered(host, domain).obstacle, None);
    vm.guest("fill kept 100M");
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    let seen = host.ebb(&format!("observe --pid {} --json", vm.pid())).ok();
    let seen: Vec<ObservedVm> = serde_json::from_str(&seen).expect("a list");
    let usage = seen[0].usage.as_ref().unwrap_or_else(|| panic!("{seen:?}"));
    assert!(usage.reclaimable_bytes > 100 * MIB, "{usage:?}");

    // Its /dev has no userfaultfd, and its control group lets it open none.
    attach(vm);
    assert_eq!(discovered(host, domain).managed_as.as_deref(), Some(vm.name()));
    vm.wait_trusted();
    let report = vm.reclaim();
    assert!(report.bytes > 100 * MIB, "{report:?}");
    is_limited(vm);
}

fn is_limited(vm: &Vm) {
    vm.ebb("limit 150M").ok();
    until("the limit to hold", || (vm.host_bytes() <= 150 * MIB).then_some(()));
    assert_eq!(vm.guest("check kept"), "0");
}

/// A guest that is reset while its memory is taken, again and again, boots and finds its memory.
fn is_reset_in_the_middle(domain: &Domain<'_>) {
    let vm = &domain.vm;
    for _ in 0..rounds(1, 5) {
        // Refused while the next kernel boots.
        vm.reboot_while(|| drop(vm.ebb("reclaim")));
        vm.wait_trusted();
        vm.guest("fill kept 100M");
        vm.guest("fill freed 200M");
        vm.guest("free freed");
        vm.reclaim();
        is_limited(vm);
    }
}

/// While nobody tells Ebb of resets, it takes no free memory; the guest goes on.
fn bears_a_libvirt_that_hangs_or_ends(libvirt: &Libvirt, domain: &Domain<'_>) {
    let vm = &domain.vm;
    libvirt.hung(|hangs| {
        assert_eq!(vm.guest("check kept"), "0");
        if hangs {
            until("a warning", || {
                let warnings = vm.last_status().warnings;
                warnings.iter().any(|line| line.contains("libvirt")).then_some(())
            });
            assert!(!vm.last_status().guest.trusted);
        }
    });
    vm.wait_trusted();
    libvirt.restart();
    assert_eq!(vm.guest("check kept"), "0");
    vm.wait_trusted();
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    let taken = || Some(vm.reclaim()).filter(|report| report.bytes > 0);
    until("free memory to be taken again", taken);
    vm.host().kill9();
    vm.host().start();
    vm.wait_trusted();
    assert_eq!(vm.guest("check kept"), "0");
}

/// What is not in memory is in the saved file, too.
fn is_saved_and_restored(domain: &mut Domain<'_>) {
    is_limited(&domain.vm);
    domain.save_and_restore();
    let vm = &domain.vm;
    assert_eq!(vm.guest("check kept"), "0");
    until("the end of the VM that was saved", || {
        vm.host().list().iter().all(|known| known.name.as_str() != vm.name()).then_some(())
    });
    vm.attach_as_found();
    vm.wait_trusted();
    is_limited(vm);
}

/// A domain as libvirt makes it, with private memory.
fn says_what_to_change(libvirt: &Libvirt) {
    let host = Host::new();
    let domain = host.domain(libvirt, guest(), "", Monitors::Own);
    let obstacle = discovered(&host, &domain).obstacle.expect("an obstacle");
    assert!(obstacle.contains(&format!("virsh edit {}", domain.name())), "{obstacle}");
    let refused = domain.vm.try_attach().refused();
    assert!(refused.contains("<source type='memfd'/>"), "{refused}");
}
