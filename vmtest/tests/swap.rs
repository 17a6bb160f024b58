//! A guest with less memory than it uses, and a disk that Ebb serves: what equals the disk is not
//! written again, and no byte of either is ever wrong.

use std::os::unix::fs::MetadataExt;

use vmtest::{Disk, Guest, Host, Vm, rounds, until};

const MIB: u64 = 1 << 20;

fn limit(vm: &Vm, mib: u64) {
    vm.ebb(&format!("limit {mib}M")).ok();
    until("the limit to hold", || (vm.host_bytes() <= mib * MIB).then_some(()));
}

fn mounted(host: &Host, disk: &Disk) -> Vm {
    let vm = host.run(Guest::debian("6.1-cloud").memory("1G").own_disk(disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm
}

/// What the guest has read from its disk is evicted without a write, and comes back from the disk.
#[test]
fn the_page_cache_is_disk_backed() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = mounted(&host, &disk);
    vm.guest("files a 250M /mnt");
    vm.guest("dropcaches");
    limit(&vm, 150);
    for _ in 0..3 {
        assert_eq!(vm.guest("checkfiles a"), "0");
    }
    let status = vm.status().limit;
    assert!(status.on_disk_total_bytes > 250 * MIB, "{status:?}");
    // This is on no disk: the guest's initial RAM disk, its kernel and programs.
    assert!(status.saved_bytes < 100 * MIB, "{status:?}");
    assert!(status.ahead_hit_total_bytes > 0, "{status:?}");
    // Each disk-backed page without memory has its digest on record: 16 bytes.
    let digests = host.run_directory().join("vms").join(vm.name()).join("digests");
    let noted = digests.metadata().expect("digests").blocks() * 512;
    assert!(noted > 90 * MIB / 4096 * 16, "{noted} bytes of digests");
    vm.guest("umount /mnt");
    vm.power_off();
    disk.check("ext4");
}

/// Page cache that the guest has dropped is not read from anywhere when a process gets its frames.
#[test]
fn new_memory_is_not_read_back() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = host.run(Guest::debian("6.1-cloud").memory("400M").own_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("files a 250M /mnt");
    vm.wait_trusted();
    limit(&vm, 150);
    assert_eq!(vm.guest("checkfiles a"), "0");
    let before = vm.status().limit;
    vm.guest("fill x 200M");
    let after = vm.status().limit;
    assert_eq!(vm.guest("check x"), "0");
    assert_eq!(vm.guest("checkfiles a"), "0");
    let avoided = after.false_reads_avoided_total_bytes + after.dropped_total_bytes
        - before.false_reads_avoided_total_bytes
        - before.dropped_total_bytes;
    let read = after.refilled_total_bytes - before.refilled_total_bytes;
    eprintln!("{avoided} bytes were not read, {read} were");
    // What is read is in use: the guest's programs, and what it has just filled.
    assert!(avoided > 100 * MIB && read < avoided / 2, "{before:?}\n{after:?}");
}

/// Blocks are overwritten while frames are disk-backed by them.
#[test]
fn blocks_change_under_disk_backed_frames() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = mounted(&host, &disk);
    limit(&vm, 150);
    vm.guest("files a 100M /mnt");
    vm.guest("diskchurn load /mnt 100M");
    for _ in 0..5 {
        vm.churn_on(3);
        assert_eq!(vm.guest("checkfiles a"), "0");
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    vm.guest("umount /mnt");
    vm.power_off();
    disk.check("ext4");
}

#[test]
fn no_byte_is_lost_when_the_daemon_dies() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = mounted(&host, &disk);
    limit(&vm, 150);
    vm.guest("files a 100M /mnt");
    vm.guest("diskchurn load /mnt 60M");
    for _ in 0..rounds(6, 100) {
        vm.churn_on(2);
        host.kill9();
        host.start();
    }
    vm.churn_on(2);
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("checkfiles a"), "0");
    until("the limit to hold again", || (vm.host_bytes() <= 150 * MIB).then_some(()));
    vm.guest("umount /mnt");
    vm.power_off();
    disk.check("ext4");
}

#[test]
fn a_vm_whose_disk_is_served_stays_managed() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M").formatted("ext4");
    let vm = mounted(&host, &disk);
    let why = vm.ebb("detach").refused();
    assert!(why.contains("serves this VM's disks"), "{why}");
    assert_eq!(vm.guest("disk /dev/vda 8M").trim(), "0");
}

/// Evicted memory that the guest frees is dropped without being touched.
#[test]
fn freed_pages_are_dropped() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").own_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("fill kept 40M");
    vm.guest("fill freed 200M");
    vm.wait_trusted();
    limit(&vm, 150);
    let before = vm.status().limit;
    assert!(before.saved_bytes > 100 * MIB, "{before:?}");
    vm.guest("free freed");
    // Other memory makes pressure: few of the frames that it takes are those of what was freed.
    vm.guest("files a 60M /mnt");
    let after = until("the rest to be dropped", || {
        vm.guest("checkfiles a");
        vm.guest("dropcaches");
        let now = vm.status().limit;
        (now.dropped_total_bytes > 50 * MIB).then_some(now)
    });
    eprintln!("{} bytes were dropped", after.dropped_total_bytes);
    let more_bytes = after.saved_total_bytes - before.saved_total_bytes;
    let kept_bytes = before.saved_bytes + more_bytes;
    assert!(after.saved_bytes + 50 * MIB < kept_bytes, "{before:?}\n{after:?}");
    assert_eq!(vm.guest("check kept"), "0");
}
