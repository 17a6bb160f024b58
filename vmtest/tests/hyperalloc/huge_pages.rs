//! Memory that the host gives in huge pages.

use vmtest::{Host, HostSetting, assets, require, rounds};

use crate::{MIB, assert_consistent, resize, start};

/// Reclaims, resizes and returns in pieces of 2 MiB, which nothing splits.
fn in_huge_pages(backing: &str) {
    let vm = start(&Host::new(), |guest| guest.backing(backing));
    vm.guest("fill kept 100M");
    vm.churn("300M");
    for _ in 0..rounds(2, 20) {
        vm.reclaim();
        assert_eq!(resize(&vm, "700M").bytes, 700 * MIB);
        vm.churn_on(1);
        resize(&vm, "1G");
        vm.churn_on(1);
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("check kept"), "0");
    let sharing = vm.status().sharing;
    assert!(sharing.installs > 0 && sharing.violations == 0, "{sharing:?}");
    assert_consistent(&vm);
    vm.host().kill9();
    vm.host().start();
    vm.wait_trusted();
    vm.guest("fill a 600M");
    assert_eq!((vm.guest("check a"), vm.guest("check kept")), ("0".into(), "0".into()));
    vm.detach();
    assert_eq!((vm.guest("check a"), vm.guest("check kept")), ("0".into(), "0".into()));
    assert_consistent(&vm);
}

#[test]
fn in_transparent_huge_pages() {
    require!(assets::kernel("llfree"));
    let setting = HostSetting::shared_huge_pages();
    require!(setting.as_ref());
    in_huge_pages("thp");
}

#[test]
fn in_reserved_huge_pages() {
    require!(assets::kernel("llfree"));
    let setting = HostSetting::reserved_huge_pages(1 << 30);
    require!(setting.as_ref());
    in_huge_pages("hugetlb");
}
