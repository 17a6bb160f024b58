//! Sizes that are refused, or that the guest does not reach.

use ebb_api::{DriverState, SizeState};
use serde_json::json;
use vmtest::{Guest, Host, Vm, until};

use crate::{GIB, MIB, growing, reach, resize, size, total_bytes, wait_total};

#[test]
fn memory_that_cannot_move_is_reported_and_left_alone() {
    let guest = growing().append("memhp_default_state=online_kernel");
    let vm = Host::new().run(guest);
    let began_bytes = total_bytes(&vm);
    reach(&vm, "1536M");
    wait_total(&vm, began_bytes + 512 * MIB);
    // Inodes and directory entries lie in slabs all over the memory.
    vm.guest("fill a 500M");
    vm.guest("sh mkdir /tmp/d; i=0; while [ $i -lt 20000 ]; do echo > /tmp/d/$i; i=$((i+1)); done");
    vm.guest("free a");
    let report = resize(&vm, "1G");
    assert!(report.bytes < 1536 * MIB, "{report:?}");
    if report.state != SizeState::Reached {
        assert_eq!(report.state, SizeState::Waiting, "{report:?}");
        let why = &report.stopped_by;
        assert!(why.contains("the kernel's own") || why.contains("figures"), "{report:?}");
        let now = size(&vm);
        assert_eq!((now.wanted_bytes, now.state), (Some(GIB), SizeState::Waiting), "{now:?}");
    }
    let report = resize(&vm, "off");
    assert_eq!(report.state, SizeState::Off, "{report:?}");
    assert!(report.stopped_by.ends_with("was removed"), "{report:?}");
    assert_eq!(resize(&vm, "off").stopped_by, "there was no target");
    let now = size(&vm);
    assert_eq!((now.wanted_bytes, now.state), (None, SizeState::Off));
    let is_at_rest = |device: &ebb_api::MemoryDeviceStatus| {
        device.requested_bytes.abs_diff(device.plugged_bytes) <= device.block_bytes
    };
    assert!(now.devices.iter().all(is_at_rest), "{now:?}");
    assert_eq!(vm.guest("sh ls /tmp/d | wc -l").trim(), "20000");
}

/// Unbinds a driver from its devices.
fn unbind(vm: &Vm, driver: &str) {
    vm.guest(&format!(
        "sh cd /sys/bus/virtio/drivers/{driver} && for d in virtio*; do echo $d > unbind; done"
    ));
}

#[test]
fn bad_sizes_are_refused_and_nothing_is_changed() {
    let host = Host::new();
    let vm = host.run(growing());
    let before = size(&vm);
    for (line, expected) in [
        ("1610612737", "lie between two sizes"),
        ("4G", "over the maximum of 3 GiB"),
        ("10M", "keeps this guest alive"),
        ("2G --node 1", "no NUMA node 1: the VM has 1"),
        ("900M --node 0", "virtio-mem can reach, 1 GiB"),
        ("2G --node 0 --by balloon", "knows no NUMA nodes"),
        ("2G --by hyperalloc", "needs one with LLFree"),
        ("900M --by virtio-mem", "virtio-mem can reach, 1 GiB"),
        ("2G --by balloon", "over the maximum of 1 GiB"),
    ] {
        let why = vm.ebb(&format!("resize {line}")).refused();
        assert!(why.contains(expected), "{line}: {why}");
        assert_eq!(size(&vm), before, "{line}");
    }
    unbind(&vm, "virtio_balloon");
    unbind(&vm, "virtio_mem");
    let before = size(&vm);
    assert_eq!(before.devices[0].driver, DriverState::Absent);
    for (line, expected) in [("600M", "driver virtio_balloon"), ("2G", "driver virtio_mem")] {
        let why = vm.ebb(&format!("resize {line}")).refused();
        assert!(why.contains(expected), "{line}: {why}");
        assert_eq!(size(&vm), before, "{line}");
    }
    let other = host.qemu(Guest::debian("6.1-cloud").memory("512M"));
    other.attach();
    for (line, expected) in [
        ("400M", "cannot have less than the 512 MiB it began with"),
        ("400M --by balloon", "no balloon"),
        ("1G", "start the VM with --grow-to"),
    ] {
        let why = other.ebb(&format!("resize {line}")).refused();
        assert!(why.contains(expected), "{line}: {why}");
    }
}

#[test]
fn a_guest_that_does_not_answer_is_waited_for_in_the_background() {
    let vm = Host::new().run(growing());
    vm.wait_trusted();
    vm.qmp("stop", json!({}));
    let report = resize(&vm, "1280M");
    assert_eq!((report.bytes, report.state), (GIB, SizeState::Waiting), "{report:?}");
    assert!(report.stopped_by.contains("does not plug 256 MiB more"), "{report:?}");
    vm.qmp("cont", json!({}));
    until("the size to be reached", || (size(&vm).state == SizeState::Reached).then_some(()));
    assert_eq!(size(&vm).plugged_bytes, 256 * MIB);
    vm.qmp("stop", json!({}));
    let report = resize(&vm, "700M");
    assert_eq!(report.state, SizeState::Waiting, "{report:?}");
    assert_eq!(size(&vm).ballooned_bytes, 0);
    vm.qmp("cont", json!({}));
    until("the size to be reached", || (size(&vm).state == SizeState::Reached).then_some(()));
    assert_eq!(size(&vm).bytes, 700 * MIB);
}

#[test]
fn no_guest_is_driven_out_of_memory() {
    let vm = Host::new().run(Guest::debian("6.1-cloud"));
    vm.guest("fill kept 400M");
    let report = resize(&vm, "200M");
    assert_eq!(report.state, SizeState::Waiting, "{report:?}");
    assert!(report.stopped_by.contains("by its own figures"), "{report:?}");
    let least = report.least_bytes.expect("the least");
    assert!(least > 450 * MIB && report.bytes >= least.min(GIB) - 4 * MIB, "{report:?}");
    assert_eq!(vm.guest("check kept"), "0");
    // Once the guest needs less, the resize goes on by itself.
    vm.guest("free kept");
    until("the guest to be made smaller", || (size(&vm).bytes < 400 * MIB).then_some(()));
    // The guest then gets the memory that it takes, and no process is killed.
    vm.guest("sh dd if=/dev/zero of=/tmp/large bs=1M count=700");
    let balloon = until("the balloon to be emptied", || {
        vm.status().balloon.filter(|balloon| balloon.ballooned_bytes == 0)
    });
    assert!(balloon.releases > 0, "{balloon:?}");
    let now = size(&vm);
    assert_eq!((now.bytes, now.state), (GIB, SizeState::Waiting), "{now:?}");
    assert!(now.stopped_by.is_some_and(|why| why.contains("about to run out")));
    assert_eq!(vm.guest("sh stat -c %s /tmp/large").trim(), (700 * MIB).to_string());
    assert_eq!(vm.complaints(), Vec::<String>::new());
}
