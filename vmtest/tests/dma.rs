//! A disk that reaches the guest's memory like a passed-through device: it cannot wait, so what was
//! taken must be back before a request uses it.

use std::io::{Write, stderr};
use std::time::Instant;

use ebb_api::{DiskCounts, Mode};
use vmtest::{Disk, Guest, Host, HostSetting, Vm, require, rounds, until};

const MIB: u64 = 1 << 20;
/// Requests that the long form of a test has a disk serve at least, and the most rounds for that.
const MANY_REQUESTS: u32 = 1_000_000;
const MANY_ROUNDS: u32 = 10_000;
/// Rounds between two lines that tell how far the long form is.
const TOLD_EVERY: u32 = 25;

fn guest(disk: &Disk) -> Guest {
    Guest::debian("6.1-cloud").memory("1G").strict_disk(disk)
}

/// Memory is freed, reclaimed, and used again for what is read from the disk.
fn free_and_read(vm: &Vm) {
    let before = vm.status().reclaimed_total_bytes;
    vm.guest("fill a 400M");
    vm.guest("free a");
    vm.guest("dropcaches");
    until("free memory to be reclaimed", || {
        (vm.status().reclaimed_total_bytes > before + 200 * MIB).then_some(())
    });
    assert_eq!(vm.guest("checkfiles a"), "0");
}

/// Returns the number of requests so far, none of which failed.
fn assert_none_failed(vm: &Vm) -> u64 {
    let disks = vm.status().disks;
    let DiskCounts { requests, failed_requests, dma_faults, .. } = disks;
    assert!(requests > 0 && failed_requests == 0 && dma_faults == 0, "{disks:?}");
    requests
}

/// Tells at once how far a test is, also where its output is kept until it has ended.
fn tell(line: &str) {
    // A test whose output nobody takes goes on.
    let _ = writeln!(stderr(), "{line}");
}

/// Runs direct and buffered I/O all the time, while free memory is reclaimed all the time.
fn loaded(host: &Host, guest: Guest) -> Vm {
    let vm = host.run(guest);
    assert_eq!(vm.status().mode, Mode::Strict);
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("files a 100M /mnt");
    vm.guest("diskchurn load /mnt 60M");
    vm.ebb("auto on --interval 100ms").ok();
    vm
}

fn assert_whole(vm: &Vm, disk: &mut Disk) {
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("checkfiles a"), "0");
    vm.guest("umount /mnt");
    vm.power_off();
    disk.check("ext4");
}

fn no_request_fails(backing: &str, least: u32) {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = loaded(&host, guest(&disk).backing(backing));
    let (began, least) = (Instant::now(), rounds(0, least));
    for round in 1.. {
        free_and_read(&vm);
        vm.churn_on(4);
        let requests = assert_none_failed(&vm);
        let is_last = round >= rounds(2, 20) && requests >= least.into();
        if is_last || round.is_multiple_of(TOLD_EVERY) {
            let minutes = began.elapsed().as_secs() / 60;
            tell(&format!("{requests} requests (least: {least}), {round} rounds, {minutes} min"));
        }
        if is_last {
            break;
        }
        assert!(round < MANY_ROUNDS, "{requests} requests in {round} rounds");
    }
    assert_eq!(vm.status().faults.early, 0);
    assert_whole(&vm, &mut disk);
}

#[test]
fn no_request_fails_while_free_memory_is_reclaimed() {
    no_request_fails("small", MANY_REQUESTS);
}

/// The next daemon knows again what the disk may use.
#[test]
fn no_request_fails_when_the_daemon_dies() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = loaded(&host, guest(&disk));
    for _ in 0..4 {
        free_and_read(&vm);
        host.kill9();
        host.start();
        vm.churn_on(4);
        assert_none_failed(&vm);
    }
    assert_whole(&vm, &mut disk);
}

/// The control: taking memory without telling the IOMMU makes requests fail.
#[test]
fn requests_fail_with_free_page_reporting() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "512M");
    let reporting = "-device virtio-balloon-pci,free-page-reporting=on";
    let vm = host.run(guest(&disk).memory("512M").qemu_args(reporting));
    // The guest's kernel reports the failures.
    vm.forgive();
    // Some of the other memory may be reported already.
    vm.guest("fill a 300M");
    assert!(vm.host_bytes() >= 300 * MIB);
    vm.guest("free a");
    // What was reported is used last: nearly all of it.
    until("free pages to be reported", || (vm.host_bytes() < 200 * MIB).then_some(()));
    let answer = vm.try_guest("disk /dev/vda 128M");
    assert!(answer.is_err(), "{answer:?}");
    let disks = vm.status().disks;
    assert!(disks.failed_requests > 0 && disks.dma_faults > 0, "{disks:?}");
    assert_eq!(vm.status().reclaimed_total_bytes, 0);
}

#[test]
fn memory_in_use_stays_for_a_device_that_cannot_wait() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M");
    let vm = host.run(guest(&disk));
    for command in ["limit 300M", "evict --bytes 100M"] {
        let why = vm.ebb(command).refused();
        assert!(why.contains("dma=strict"), "{why}");
    }
    let run = format!(
        "run --name other --memory 64M --kernel /vmlinuz --mode release --disk {},dma=strict",
        disk.image().display()
    );
    let why = host.ebb(&run).refused();
    assert!(why.contains("needs strict mode"), "{why}");
}

/// Tests that change a setting of the host, or whose time counts: no other test runs beside them.
mod alone {
    use super::*;

    #[test]
    fn no_request_fails_in_huge_pages() {
        let setting = HostSetting::shared_huge_pages();
        require!(setting.as_ref());
        no_request_fails("thp", 0);
    }
}
