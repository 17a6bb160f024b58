//! Tests that change a setting of the host, or whose time counts: no other test runs beside them.

use vmtest::{Disk, Host, HostSetting, assets, require, rounds, until};

use crate::{MIB, assert_consistent, resize, start, tools};

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

/// The page cache has all memory: without the guest's help there is nothing to reclaim.
#[test]
fn caches_are_freed_for_a_size() {
    require!(assets::kernel("llfree"));
    require!(tools());
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "1G").formatted("ext4");
    let vm = start(&host, |guest| guest.own_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("files kept 650M /mnt");
    let report = resize(&vm, "300M");
    assert!(report.purges > 0, "{report:?}");
    assert_eq!(report.bytes, 300 * MIB, "{report:?}");
    assert_consistent(&vm);
    assert_eq!(vm.guest("checkfiles kept"), "0");
    // A size that cannot be reached is reported.
    resize(&vm, "1G");
    vm.guest("fill a 600M");
    let report = resize(&vm, "300M");
    assert!(report.bytes > 600 * MIB && report.stopped_by.contains("in use"), "{report:?}");
    // A reserve stays with the guest. Once half of it is used, the guest gets all memory back.
    let mut mib = 30;
    until("reclaimed memory to be returned", || {
        mib += 2;
        // The guest may have no room for that much.
        let _ =
            vm.try_guest(&format!("sh busybox dd if=/dev/zero of=/dev/null bs={mib}M count=100"));
        let status = vm.status();
        let stopped_by = status.size.stopped_by.unwrap_or_default();
        let is_back = status.sharing.hard_bytes == 0;
        (is_back && stopped_by.contains("about to run out of memory")).then_some(())
    });
    vm.guest("fill b 200M");
    assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
    let refused = vm.ebb("resize 2G").refused();
    assert!(refused.contains("over the maximum of 1 GiB"), "{refused}");
}
