//! A guest whose kernel shares its allocator: LLFree in the buddy allocator's place.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ebb_api::{Mechanism, ResizeReport};
use vmtest::{Disk, Guest, Host, Vm, assets, require, rounds, until};

const MIB: u64 = 1 << 20;

fn start(host: &Host, change: impl FnOnce(Guest) -> Guest) -> Vm {
    let vm = host.run(change(Guest::debian("llfree")));
    vm.wait_trusted();
    see_kernel(&vm);
    vm
}

/// Has the guest see what its kernel tells for debugging.
fn see_kernel(vm: &Vm) {
    vm.guest("mount debugfs none /sys/kernel/debug");
}

fn resize(vm: &Vm, size: &str) -> ResizeReport {
    serde_json::from_str(&vm.ebb(&format!("resize {size} --json")).ok()).expect("a report")
}

/// The guest's kernel compares all that it knows of its free frames; a count may be on its
/// way.
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
    for _ in 0..rounds(3, 20) {
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

/// The page cache has it all: without the guest's help there is nothing to take.
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
    // What cannot be had is told.
    resize(&vm, "1G");
    vm.guest("fill a 600M");
    let report = resize(&vm, "300M");
    assert!(report.bytes > 600 * MIB && report.stopped_by.contains("in use"), "{report:?}");
    assert_eq!(vm.guest("check a"), "0");
    let refused = vm.ebb("resize 2G").refused();
    assert!(refused.contains("out of range"), "{refused}");
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
    vm.churn_on(rounds(3, 20).into());
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

/// Lets time pass; which instruction is hit does not matter.
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
    vm.churn("400M");
    for round in 0..rounds(12, 100) {
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
