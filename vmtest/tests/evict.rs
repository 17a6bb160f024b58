//! Memory in use is evicted by force: the guest notices nothing but time.

use ebb_api::EvictReport;
use vmtest::{Disk, Guest, Host, Vm, rounds};

const MIB: u64 = 1 << 20;

fn evict(vm: &Vm, bytes: u64) -> EvictReport {
    let report = vm.ebb(&format!("evict --bytes {bytes} --json")).ok();
    serde_json::from_str(&report).expect("a report")
}

#[test]
fn everything_is_evicted_and_comes_back() {
    let vm = Host::new().run(Guest::debian("6.1-cloud"));
    vm.guest("fill a 400M");
    vm.guest("files f 100M");
    let before = vm.host_bytes();
    let report = evict(&vm, 1024 * MIB);
    assert!(vm.host_bytes() + 400 * MIB < before, "{report:?}");
    assert_eq!(vm.guest("check a"), "0");
    assert_eq!(vm.guest("checkfiles f"), "0");
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn holes_are_not_evicted_and_a_detach_leaves_them() {
    let vm = Host::new().run(Guest::debian("6.1-cloud"));
    vm.guest("fill a 100M");
    let before = vm.host_bytes();
    let report = evict(&vm, 1024 * MIB);
    // The guest runs meanwhile.
    let slack = 32 * MIB;
    assert!(report.saved_bytes <= before + slack, "{report:?}, {before} bytes were resident");
    vm.detach();
    let after = vm.host_bytes();
    assert!(after <= before + slack, "{after} bytes are resident, {before} were");
    assert_eq!(vm.guest("check a"), "0");
}

/// Reclaims free memory, evicts used memory and kills the daemon in turns.
fn torture(mode: &str) {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").mode(mode));
    vm.guest("fill kept 100M");
    vm.guest("files f 50M");
    vm.churn("150M");
    for round in 0..rounds(1, 30) {
        evict(&vm, 1024 * MIB);
        vm.reclaim();
        if round % 2 == 0 {
            host.kill9();
            host.start();
        }
        vm.churn_on(1);
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    evict(&vm, 1024 * MIB);
    vm.detach();
    assert_eq!(vm.guest("check kept"), "0");
    assert_eq!(vm.guest("checkfiles f"), "0");
}

#[test]
fn torture_in_strict_mode() {
    torture("strict");
}

#[test]
fn torture_in_release_mode() {
    torture("release");
}

#[test]
fn a_device_writes_into_evicted_memory() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").disk("200M").mode("strict"));
    for _ in 0..rounds(1, 5) {
        vm.guest("fill a 300M");
        evict(&vm, 1024 * MIB);
        assert_eq!(vm.guest("disk /dev/vda 200M"), "0");
        evict(&vm, 1024 * MIB);
        assert_eq!(vm.guest("check a"), "0");
    }
}

/// QEMU stops the disk's rings with the guest, and nobody pins them then.
#[test]
fn the_rings_of_a_paused_guest_are_evicted_and_come_back() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M");
    let vm = host.run(Guest::debian("6.1-cloud").own_device(disk.image()));
    assert_eq!(vm.guest("disk /dev/vda 16M"), "0");
    for _ in 0..rounds(2, 10) {
        let evicted = vm.stopped(|| evict(&vm, 1024 * MIB).saved_bytes);
        assert!(evicted > 0);
        assert_eq!(vm.guest("disk /dev/vda 16M"), "0");
    }
}
