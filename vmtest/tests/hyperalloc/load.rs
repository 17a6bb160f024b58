//! Guests under load: nothing is lost, whatever happens meanwhile.

use std::thread;
use std::time::Duration;

use vmtest::{Disk, Host, assets, busy_for, require, rounds, until};

use crate::{MIB, assert_consistent, resize, start, tools, total_bytes};

#[test]
fn a_size_is_reached_and_left_again_under_load() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest);
    vm.guest("fill kept 100M");
    let all = total_bytes(&vm);
    vm.churn("200M");
    for _ in 0..rounds(2, 20) {
        let report = resize(&vm, "600M");
        assert_eq!(report.bytes, 600 * MIB, "{report:?}");
        vm.churn_on(1);
        let less = total_bytes(&vm);
        assert!(less + 400 * MIB < all, "{less} of {all}");
        let report = resize(&vm, "1G");
        assert_eq!((report.bytes, report.taken_bytes), (1 << 30, 0), "{report:?}");
        vm.reclaim();
        vm.churn_on(1);
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("check kept"), "0");
    assert_eq!(vm.status().sharing.violations, 0);
    assert_consistent(&vm);
    assert_eq!(total_bytes(&vm), all);
}

#[test]
fn killed_daemons_lose_nothing() {
    require!(assets::kernel("llfree"));
    let host = Host::new();
    let vm = start(&host, |guest| guest);
    vm.guest("fill kept 100M");
    vm.churn("200M");
    for round in 0..rounds(4, 100) {
        let taking = thread::spawn({
            let host = host.clone();
            let line = ["reclaim vm0", "resize vm0 700M", "resize vm0 1G"][round as usize % 3];
            move || host.ebb(line)
        });
        busy_for(Duration::from_millis(u64::from(round) * 7 % 100));
        host.kill9();
        // It may have finished before.
        let _ = taking.join().expect("ebb ends");
        host.start();
        vm.churn_on(1);
    }
    resize(&vm, "1G");
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("check kept"), "0");
    let status = vm.status();
    assert_eq!((status.sharing.hard_bytes, status.sharing.violations), (0, 0));
    assert_consistent(&vm);
    vm.detach();
    assert_eq!(vm.guest("check kept"), "0");
}

/// A device that cannot wait finds all memory that the guest hands to it.
#[test]
fn no_request_of_a_strict_disk_fails() {
    require!(assets::kernel("llfree"));
    require!(tools());
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = start(&host, |guest| guest.strict_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("files a 100M /mnt");
    vm.guest("diskchurn load /mnt 60M");
    vm.ebb("auto on --interval 100ms").ok();
    for _ in 0..rounds(2, 20) {
        let before = vm.status().reclaimed_total_bytes;
        vm.guest("fill b 400M");
        vm.guest("free b");
        vm.guest("dropcaches");
        until("free memory to be reclaimed", || {
            (vm.status().reclaimed_total_bytes > before + 200 * MIB).then_some(())
        });
        assert_eq!(vm.guest("checkfiles a"), "0");
        vm.churn_on(4);
    }
    let disks = vm.status().disks;
    assert!(disks.requests > 0, "{disks:?}");
    assert_eq!((disks.failed_requests, disks.dma_faults), (0, 0), "{disks:?}");
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    vm.guest("umount /mnt");
    assert_consistent(&vm);
    // Ten rounds a second ask QEMU, and QEMU 7.2 may never end if it is asked while it ends.
    vm.ebb("auto off").ok();
    vm.power_off();
    disk.check("ext4");
}

/// Programs that read again what they have written: memory of all kinds, files, forks.
#[test]
fn stress_ng_finds_no_wrong_byte() {
    require!(assets::kernel("llfree"));
    require!(tools());
    let userland = assets::userland();
    require!(userland.as_ref());
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "2G").formatted("ext4").filled(&userland.unwrap());
    let vm = start(&host, |guest| guest.own_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("sh busybox mount -t proc proc /mnt/proc");
    vm.ebb("auto on --interval 100ms").ok();
    let stress = format!(
        "timed program /mnt stress-ng --quiet --verify --temp-path /root --vm 1 --vm-bytes 96M \
         --mmap 1 --mmap-bytes 64M --fork 1 --memfd 1 --memfd-bytes 64M --hdd 1 --hdd-bytes 64M \
         --timeout {}",
        rounds(8, 150)
    );
    let times = thread::scope(|scope| {
        let stress = scope.spawn(|| vm.guest(&stress));
        let mut times = 0;
        while !stress.is_finished() {
            resize(&vm, "640M");
            resize(&vm, "1G");
            times += 1;
        }
        // It ends with an error if a byte is not what it was.
        stress.join().map(|_| times).expect("stress-ng ends well")
    });
    assert!(times > 1, "{times}");
    let status = vm.status();
    assert!(status.sharing.installs > 0, "{:?}", status.sharing);
    assert_eq!(status.sharing.violations, 0);
    vm.guest("sh busybox umount /mnt/proc");
    vm.guest("umount /mnt");
    assert_consistent(&vm);
    vm.power_off();
    disk.check("ext4");
}
