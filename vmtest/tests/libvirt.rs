//! VMs of libvirt, as Debian ships it.

use ebb_api::{DiscoveredVm, ObservedVm};
use vmtest::{Domain, Guest, Host, Libvirt, require, until};

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
    is_managed(&libvirt);
    says_what_to_change(&libvirt);
}

fn is_managed(libvirt: &Libvirt) {
    let host = Host::new();
    let domain = host.domain(libvirt, guest(), MEMFD);
    let vm = &domain.vm;
    assert_eq!(discovered(&host, &domain).obstacle, None);
    vm.guest("fill kept 100M");
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    let seen = host.ebb(&format!("observe --pid {} --json", vm.pid())).ok();
    let seen: Vec<ObservedVm> = serde_json::from_str(&seen).expect("a list");
    let usage = seen[0].usage.as_ref().unwrap_or_else(|| panic!("{seen:?}"));
    assert!(usage.reclaimable_bytes > 100 * MIB, "{usage:?}");

    // Its /dev has no userfaultfd, and its control group lets it open none.
    vm.attach();
    assert_eq!(discovered(&host, &domain).managed_as.as_deref(), Some(vm.name()));
    vm.wait_trusted();
    assert!(vm.reclaim().bytes > 100 * MIB);
    vm.ebb("limit 150M").ok();
    until("the limit to hold", || (vm.host_bytes() <= 150 * MIB).then_some(()));
    assert_eq!(vm.guest("check kept"), "0");
    host.kill9();
    host.start();
    assert_eq!(vm.guest("check kept"), "0");
    vm.detach();
    assert_eq!(vm.guest("check kept"), "0");
    assert!(domain.virsh("domstate", &[]).contains("running"));
}

/// A domain as libvirt makes it, with private memory.
fn says_what_to_change(libvirt: &Libvirt) {
    let host = Host::new();
    let domain = host.domain(libvirt, guest(), "");
    let obstacle = discovered(&host, &domain).obstacle.expect("an obstacle");
    assert!(obstacle.contains(&format!("virsh edit {}", domain.name())), "{obstacle}");
    let refused = domain.vm.try_attach().refused();
    assert!(refused.contains("<source type='memfd'/>"), "{refused}");
}
