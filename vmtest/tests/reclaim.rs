//! Free memory is returned to the host and comes back, and no byte that the guest wrote changes.

use ebb_api::Backing;
use vmtest::{
    Guest, Host, HostSetting, assert_goes_and_comes_back, assets, require, rounds, until,
};

const MIB: u64 = 1 << 20;

#[test]
fn freed_memory_goes_to_the_host_and_comes_back() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").memory("1G"));
    vm.guest("fill a 600M");
    vm.guest("free a");
    let before = vm.status().resident_bytes;
    vm.reclaim();
    assert!(vm.status().resident_bytes + 500 * MIB < before);
    vm.guest("fill a 600M");
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn release_mode_under_load() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").mode("release"));
    assert_goes_and_comes_back(&vm);
}

#[test]
fn strict_mode_under_load() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").mode("strict"));
    assert_goes_and_comes_back(&vm);
    assert!(vm.status().faults.metadata > 0);
}

#[test]
fn every_mode_with_init_on_free() {
    for mode in ["release", "strict"] {
        let guest = Guest::debian("6.1-cloud").append("init_on_free=1").mode(mode);
        assert_goes_and_comes_back(&Host::new().run(guest));
    }
}

#[test]
fn every_mode_without_address_randomization() {
    for mode in ["release", "strict"] {
        let guest = Guest::debian("6.1-cloud").append("nokaslr").mode(mode);
        let vm = Host::new().run(guest);
        assert_goes_and_comes_back(&vm);
        // Its kernel boots to the same addresses, and finds there what the last boot left.
        for _ in 0..rounds(1, 20) {
            vm.guest("fill a 600M");
            vm.guest("free a");
            vm.reboot_while(|| drop(vm.ebb("reclaim")));
        }
        vm.guest("fill a 600M");
        assert_eq!(vm.guest("check a"), "0");
    }
}

/// Such a guest checks that free pages still have the poison. If they do not, it says so on its
/// console, and that fails the test.
fn poisoned(mode: &str) {
    let guest = Guest::debian("6.1").append("page_poison=1").mode(mode);
    let vm = Host::new().run(guest);
    vm.guest("fill a 500M");
    vm.guest("free a");
    let taken = vm.ebb("reclaim");
    assert!(taken.code == Some(0) || taken.refused().contains("poison"));
    vm.guest("fill a 500M");
    assert_eq!(vm.guest("check a"), "0");
    vm.detach();
    vm.guest("fill a 700M");
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn poisoned_free_pages_in_release_mode() {
    require!(assets::kernel("6.1"));
    poisoned("release");
}

#[test]
fn poisoned_free_pages_in_strict_mode() {
    require!(assets::kernel("6.1"));
    poisoned("strict");
}

#[test]
fn kernel_5_10_in_strict_mode() {
    require!(assets::kernel("5.10"));
    assert_goes_and_comes_back(&Host::new().run(Guest::debian("5.10").mode("strict")));
}

#[test]
fn kernel_6_12_in_strict_mode() {
    require!(assets::kernel("6.12"));
    assert_goes_and_comes_back(&Host::new().run(Guest::debian("6.12").mode("strict")));
}

#[test]
fn kernel_7_in_strict_mode() {
    require!(assets::kernel("7.x"));
    assert_goes_and_comes_back(&Host::new().run(Guest::debian("7.x").mode("strict")));
}

/// QEMU's disk writes into pages that no processor has touched since they were freed.
#[test]
fn a_device_meets_no_empty_memory_in_strict_mode() {
    let guest = Guest::debian("6.1-cloud").disk("300M").mode("strict");
    let vm = Host::new().run(guest);
    for _ in 0..rounds(2, 20) {
        vm.guest("fill a 600M");
        vm.guest("free a");
        vm.guest("dropcaches");
        vm.reclaim();
        assert_eq!(vm.guest("disk /dev/vda 300M"), "0");
    }
    assert_eq!(vm.status().faults.early, 0);
}

#[test]
fn no_more_is_reclaimed_than_asked_for() {
    let vm = Host::new().run(Guest::debian("6.1-cloud"));
    vm.guest("fill a 600M");
    vm.guest("free a");
    let before = vm.host_bytes();
    vm.ebb("reclaim --bytes 100M").ok();
    let taken = before - vm.host_bytes();
    assert!((90 * MIB..=104 * MIB).contains(&taken), "{taken}");
}

#[test]
fn automatic_reclaim_follows_the_guest() {
    let vm = Host::new().run(Guest::debian("6.1-cloud"));
    vm.ebb("auto on --interval 500ms --keep 200M").ok();
    for _ in 0..3 {
        vm.guest("fill a 500M");
        assert!(vm.host_bytes() > 500 * MIB);
        vm.guest("free a");
        until("the host's memory", || (vm.host_bytes() < 450 * MIB).then_some(()));
    }
    vm.ebb("auto off").ok();
    vm.guest("fill a 500M");
    assert_eq!(vm.guest("check a"), "0");
}

/// Tests huge pages, also while all memory changes.
fn huge(mode: &str) {
    let vm = Host::new().run(Guest::debian("6.1-cloud").backing("thp").mode(mode));
    assert_eq!(vm.status().backing, Backing::Thp);
    assert_goes_and_comes_back(&vm);
}

/// Tests that change a setting of the host, or whose time counts: no other test runs beside them.
mod alone {
    use super::*;

    #[test]
    fn huge_pages_go_and_come_back_in_release_mode() {
        let setting = HostSetting::shared_huge_pages();
        require!(setting.as_ref());
        huge("release");
    }

    #[test]
    fn huge_pages_go_and_come_back_in_strict_mode() {
        let setting = HostSetting::shared_huge_pages();
        require!(setting.as_ref());
        huge("strict");
    }

    #[test]
    fn a_guest_in_reserved_huge_pages_is_managed_but_not_reclaimed() {
        let setting = HostSetting::reserved_huge_pages(1 << 30);
        require!(setting.as_ref());
        let vm = Host::new().run(Guest::debian("6.1-cloud").memory("1G").backing("hugetlb"));
        let why = vm.ebb("reclaim").refused();
        assert!(why.contains("4 KiB"), "{why}");
        assert_eq!(vm.status().backing, Backing::Hugetlb);
    }
}
