//! A guest whose kernel shares its allocator: LLFree in the buddy allocator's place.

mod alone;
mod load;
mod violation;

use std::process::Command;

use ebb_api::{Mechanism, ResizeReport};
use vmtest::{Guest, Host, ScatteredFiles, Vm, assets, require, rounds, until};

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

fn tools() -> Result<(), String> {
    let found = Command::new("mkfs.ext4").arg("-V").output();
    found.map(drop).map_err(|_| "no mkfs.ext4: run scripts/setup".into())
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

/// A kernel without a random base boots to the same addresses each time, and finds there what the
/// last one left. It loses memory if Ebb takes that for its own.
#[test]
fn a_kernel_that_boots_again_is_not_taken_for_the_last_boot() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest);
    for _ in 0..rounds(4, 40) {
        vm.guest("fill a 600M");
        vm.guest("free a");
        // Most of these are refused: no kernel is known while it boots.
        vm.reboot_while(|| drop(vm.ebb("reclaim")));
        vm.wait_trusted();
    }
    see_kernel(&vm);
    assert_consistent(&vm);
}

#[test]
fn scattered_memory_is_put_together() {
    require!(assets::kernel("llfree"));
    let vm = start(&Host::new(), |guest| guest.memory("512M"));
    let files = ScatteredFiles::make(&vm, 2500);
    vm.reclaim();
    let scattered = vm.host_bytes();
    vm.ebb("auto on --interval 200ms").ok();
    // 117 MiB were freed in pieces of 48 KiB.
    until("what is scattered to go", || (vm.host_bytes() + 60 * MIB < scattered).then_some(()));
    files.check();
    assert_consistent(&vm);
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

/// What a limit has evicted is dropped once it is free.
#[test]
fn saved_pages_of_free_memory_are_dropped() {
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
