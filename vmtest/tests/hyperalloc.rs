//! A guest whose kernel shares its allocator: LLFree in the buddy allocator's place.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ebb_api::{Mechanism, OnViolation, ResizeReport};
use serde_json::json;
use vmtest::{Disk, Guest, Host, HostSetting, Vm, assets, require, rounds, until};

const MIB: u64 = 1 << 20;

fn start(host: &Host, change: impl FnOnce(Guest) -> Guest) -> Vm {
    let vm = host.run(change(Guest::debian("llfree")));
    vm.wait_trusted();
    see_kernel(&vm);
    vm
}

/// Mounts the guest's debugfs, where its kernel has its own figures.
fn see_kernel(vm: &Vm) {
    vm.guest("mount debugfs none /sys/kernel/debug");
}

fn resize(vm: &Vm, size: &str) -> ResizeReport {
    let report = vm.ebb(&format!("resize {size} --json")).ok_or_short();
    serde_json::from_str(&report).expect("a report")
}

/// Checks that the guest's kernel finds its records of free frames consistent. A count may be on
/// its way, so it tries again.
fn assert_consistent(vm: &Vm) {
    until("consistent state in the guest", || {
        let text = vm.guest("cat /sys/kernel/debug/llfree");
        text.trim_end().ends_with("OK").then_some(())
    });
}

fn total_bytes(vm: &Vm) -> u64 {
    let text = vm.guest("cat /proc/meminfo");
    let mut words = text.split_whitespace().skip_while(|&word| word != "MemTotal:").skip(1);
    words.next().and_then(|kib| kib.parse::<u64>().ok()).expect("MemTotal") * 1024
}

#[test]
fn freed_memory_goes_and_comes_back_when_touched() {
    require!(assets::kernel("llfree"));
    for mode in ["release", "strict"] {
        let vm = start(&Host::new(), |guest| guest.mode(mode));
        vm.guest("fill kept 100M");
        vm.guest("fill a 500M");
        vm.guest("free a");
        let full_bytes = vm.host_bytes();
        let report = vm.reclaim();
        assert!(vm.host_bytes() + 400 * MIB < full_bytes, "{report:?}, {full_bytes} before");
        let status = vm.status();
        assert_eq!(status.mechanism, Mechanism::HyperAlloc, "{}", status.mechanism_reason);
        assert!(status.sharing.soft_bytes >= 400 * MIB, "{:?}", status.sharing);
        vm.guest("fill a 500M");
        assert_eq!((vm.guest("check a"), vm.guest("check kept")), ("0".into(), "0".into()));
        let status = vm.status();
        assert!(status.sharing.installs > 200, "{:?}", status.sharing);
        assert_eq!(status.sharing.violations, 0);
        assert_consistent(&vm);
        vm.detach();
        vm.guest("fill b 200M");
        assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
        assert_consistent(&vm);
    }
}

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

fn tools() -> Result<(), String> {
    let found = Command::new("mkfs.ext4").arg("-V").output();
    found.map(drop).map_err(|_| "no mkfs.ext4: run scripts/setup".into())
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
    vm.leave("sh busybox dd if=/dev/zero of=/dev/null bs=40M count=400");
    until("what was taken to come back", || (vm.status().sharing.hard_bytes == 0).then_some(()));
    let stopped_by = vm.status().size.stopped_by.unwrap_or_default();
    assert!(stopped_by.contains("about to run out of memory"), "{stopped_by}");
    vm.guest("fill b 200M");
    assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
    let refused = vm.ebb("resize 2G").refused();
    assert!(refused.contains("over the maximum of 1 GiB"), "{refused}");
}

#[test]
fn automatic_reclaim_keeps_an_idle_guest_small() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest);
    vm.guest("fill a 600M");
    vm.ebb("auto on --interval 500ms").ok();
    vm.guest("free a");
    until("the memory to go", || (vm.host_bytes() < 300 * MIB).then_some(()));
    vm.churn("400M");
    vm.churn_on(rounds(2, 20).into());
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    until("the memory to go again", || (vm.host_bytes() < 300 * MIB).then_some(()));
    vm.reboot();
    vm.wait_trusted();
    see_kernel(&vm);
    vm.guest("fill a 600M");
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("free a");
    until("the memory to go after a reset", || (vm.host_bytes() < 300 * MIB).then_some(()));
    assert_consistent(&vm);
}

#[test]
fn scattered_memory_is_put_together() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest.memory("512M"));
    let content = vm.scatter(2500);
    vm.reclaim();
    let scattered = vm.host_bytes();
    vm.ebb("auto on --interval 200ms").ok();
    // 117 MiB were freed in pieces of 48 KiB.
    until("what is scattered to go", || (vm.host_bytes() + 60 * MIB < scattered).then_some(()));
    assert_eq!(vm.scattered(), content);
    assert_consistent(&vm);
}

/// Lets time pass. It does not matter which instruction is hit.
fn busy_for(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        thread::yield_now();
    }
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

/// Memory of zone Normal goes before that of DMA32, and back.
#[test]
fn memory_above_4_gib_goes_first() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest.memory("5G"));
    vm.guest("fill kept 200M");
    let report = resize(&vm, "4G");
    assert_eq!((report.bytes, report.purges), (4 << 30, 0), "{report:?}");
    let zones = vm.guest("cat /proc/zoneinfo");
    let report = resize(&vm, "1G");
    assert_eq!(report.bytes, 1 << 30, "{report:?}\n{zones}");
    vm.guest("fill a 500M");
    resize(&vm, "5G");
    vm.guest("fill b 3G");
    assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
    assert_eq!(vm.guest("check kept"), "0");
    assert_consistent(&vm);
}

#[test]
fn two_nodes_of_a_vm_that_others_started() {
    require!(assets::kernel("llfree"));
    let vm = Host::new().qemu(Guest::debian("llfree").nodes(2));
    see_kernel(&vm);
    vm.guest("fill kept 100M");
    vm.guest("fill a 600M");
    vm.guest("free a");
    for _ in 0..rounds(2, 10) {
        vm.attach();
        vm.wait_trusted();
        let before = vm.host_bytes();
        vm.reclaim();
        assert!(vm.host_bytes() + 400 * MIB < before);
        assert_eq!(resize(&vm, "500M").bytes, 500 * MIB);
        vm.detach();
        vm.guest("fill a 600M");
        assert_eq!((vm.guest("check a"), vm.guest("check kept")), ("0".into(), "0".into()));
        vm.guest("free a");
        assert_consistent(&vm);
    }
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
        until("free memory to be taken", || {
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

/// What a limit has evicted is dropped once it is free.
#[test]
fn what_is_saved_and_free_is_dropped() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest);
    vm.guest("fill kept 50M");
    vm.ebb("limit 250M").ok();
    vm.guest("fill a 350M");
    let saved = vm.status().limit.saved_bytes;
    assert!(saved > 100 * MIB, "{saved}");
    vm.guest("free a");
    vm.reclaim();
    let left = vm.status().limit.saved_bytes;
    assert!(left < saved / 2, "{left} of {saved}");
    vm.ebb("limit off").ok();
    vm.guest("fill a 200M");
    assert_eq!((vm.guest("check a"), vm.guest("check kept")), ("0".into(), "0".into()));
    assert_consistent(&vm);
}

/// Reads guest-physical memory all over, as nothing in the guest would: most of it is no longer the
/// guest's.
fn touch_all_over(vm: &Vm) {
    for at in (64..1024).step_by(32) {
        let line = format!("xp /1xg {:#x}", at * MIB);
        vm.qmp("human-monitor-command", json!({ "command-line": line }));
    }
}

#[test]
fn a_vm_that_touches_what_it_may_not_have_is_stopped_if_wanted() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest);
    assert_eq!(resize(&vm, "200M").bytes, 200 * MIB);
    touch_all_over(&vm);
    let sharing = vm.status().sharing;
    assert!(sharing.violations > 4 && sharing.stopped.is_none(), "{sharing:?}");
    let report = vm.ebb("resize 200M --on-violation stop --json").ok();
    assert!(report.contains("the size asked for was reached"), "{report}");
    resize(&vm, "1G");
    resize(&vm, "200M");
    touch_all_over(&vm);
    let sharing = until("the VM to be stopped", || {
        Some(vm.status().sharing).filter(|sharing| sharing.stopped.is_some())
    });
    assert_eq!(sharing.on_violation, OnViolation::Stop);
    let state = vm.qmp("query-status", json!({}));
    assert_eq!(state["status"], "paused", "{state}");
    vm.qmp("cont", json!({}));
    resize(&vm, "1G");
    vm.guest("fill a 600M");
    assert_eq!(vm.guest("check a"), "0");
    assert_consistent(&vm);
}
