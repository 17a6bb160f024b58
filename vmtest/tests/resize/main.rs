//! A VM grows and shrinks by QEMU's balloon and virtio-mem.

mod again;
mod blocked;
mod plugged;

use ebb_api::{DriverState, ResizeReport, SizeMechanism, SizeState, SizeStatus};
use serde_json::json;
use vmtest::{Guest, Host, Vm, until};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MOVABLE: &str = "memhp_default_state=online_movable";
/// Slack for memory of others that cannot be distinguished from the guest's own: firmware, and what
/// QEMU itself touches.
const OTHERS_BYTES: u64 = 32 * MIB;

fn resize(vm: &Vm, line: &str) -> ResizeReport {
    let report = vm.ebb(&format!("resize {line} --json")).ok_or_short();
    serde_json::from_str(&report).expect("a report")
}

/// Resizes, and repeats that until the target is reached: on a busy host a guest may stall on the
/// way.
fn reach(vm: &Vm, line: &str) -> ResizeReport {
    let report = resize(vm, line);
    until(format_args!("the size of {report:?}"), || {
        (size(vm).state == SizeState::Reached).then_some(())
    });
    ResizeReport { bytes: report.wanted_bytes, ..report }
}

fn size(vm: &Vm) -> SizeStatus {
    vm.status().size
}

fn growing() -> Guest {
    Guest::debian("6.1-cloud").memory("1G").grow_to("3G").append(MOVABLE)
}

fn field_bytes(text: &str, name: &str) -> u64 {
    let mut words = text.split_whitespace().skip_while(|&word| word != name).skip(1);
    words.next().and_then(|kib| kib.parse::<u64>().ok()).expect("a field of meminfo") * 1024
}

fn total_bytes(vm: &Vm) -> u64 {
    field_bytes(&vm.guest("cat /proc/meminfo"), "MemTotal:")
}

/// Memory of the guest on a node in bytes, once it no longer changes.
fn node_bytes(vm: &Vm, node: u32) -> u64 {
    let text = vm.guest(&format!("cat /sys/devices/system/node/node{node}/meminfo"));
    field_bytes(&text, "MemTotal:")
}

/// Waits for the guest's total memory. Linux removes its memory block after the device's blocks.
fn wait_total(vm: &Vm, near_bytes: u64) {
    until(format_args!("{near_bytes} bytes in the guest"), || {
        (total_bytes(vm).abs_diff(near_bytes) < 16 * MIB).then_some(())
    });
}

#[test]
fn the_balloon_takes_and_gives_what_the_vm_began_with() {
    let vm = Host::new().run(Guest::debian("6.1-cloud"));
    vm.guest("fill kept 100M");
    vm.guest("fill a 700M");
    vm.guest("free a");
    assert!(vm.host_bytes() > 800 * MIB);
    let report = reach(&vm, "500M");
    assert_eq!(report.mechanism, SizeMechanism::Balloon, "{report:?}");
    assert!(vm.host_bytes() < 500 * MIB + OTHERS_BYTES, "{}", vm.host_bytes());
    let status = vm.status();
    assert_eq!((status.size.bytes, status.size.ballooned_bytes), (500 * MIB, 524 * MIB));
    let balloon = status.balloon.expect("a balloon");
    assert_eq!((balloon.driver, balloon.deflates_on_oom), (DriverState::Ready, true));
    // The guest reports them every few seconds.
    until("figures of the guest as it is now", || {
        let figures = vm.status().balloon?.figures?;
        figures.available_bytes.is_some_and(|bytes| bytes < 500 * MIB).then_some(())
    });
    assert_eq!((balloon.reporting_offered, balloon.reporting), (false, Some(false)));
    vm.guest("fill b 100M");
    reach(&vm, "1G");
    vm.guest("fill a 500M");
    assert_eq!((vm.guest("check a"), vm.guest("check b")), ("0".into(), "0".into()));
    assert_eq!(vm.guest("check kept"), "0");
    assert_eq!(vm.status().balloon.expect("a balloon").releases, 0);
}

#[test]
fn blocks_come_and_go_beyond_what_it_began_with() {
    let vm = Host::new().run(growing());
    vm.guest("fill kept 100M");
    let (began_bytes, before) = (total_bytes(&vm), vm.status());
    assert_eq!((before.memory_bytes, before.size.max_bytes), (GIB, 3 * GIB));
    let report = reach(&vm, "1536M");
    assert_eq!(report.mechanism, SizeMechanism::VirtioMem, "{report:?}");
    wait_total(&vm, began_bytes + 512 * MIB);
    assert!(vm.host_bytes() < GIB, "nothing is taken before it is touched");
    vm.guest("fill a 1100M");
    assert_eq!(vm.guest("check a"), "0");
    assert!(vm.status().resident_bytes > 1100 * MIB);
    vm.guest("free a");
    reach(&vm, "1G");
    wait_total(&vm, began_bytes);
    assert!(vm.host_bytes() < GIB + OTHERS_BYTES, "{}", vm.host_bytes());
    assert_eq!(vm.guest("check kept"), "0");
    // Below its boot memory, the balloon goes on.
    let report = reach(&vm, "700M");
    assert_eq!(report.mechanism, SizeMechanism::Balloon, "{report:?}");
    reach(&vm, "1280M");
    let now = size(&vm);
    assert_eq!((now.ballooned_bytes, now.plugged_bytes), (0, 256 * MIB), "{now:?}");
    assert_eq!(vm.guest("check kept"), "0");
}

/// Like the paper's Table 1, with smaller sizes.
#[test]
fn nodes_are_resized_each_by_itself() {
    let guest = Guest::debian("6.1-cloud").memory("1G").run_nodes(2).grow_to("3G").append(MOVABLE);
    let vm = Host::new().run(guest);
    let began = [node_bytes(&vm, 0), node_bytes(&vm, 1)];
    for (node, wanted) in [(0, 768), (1, 1512), (0, 612), (1, 512), (0, 512)] {
        let report = reach(&vm, &format!("{wanted}M --node {node}"));
        assert_eq!((report.node, report.bytes), (Some(node), wanted * MIB), "{report:?}");
        let expected = began[node as usize] + (wanted - 512) * MIB;
        until("the node's memory", || {
            (node_bytes(&vm, node).abs_diff(expected) < 16 * MIB).then_some(())
        });
    }
    let report = reach(&vm, "2G");
    let devices = size(&vm).devices;
    let is_half = |device: &ebb_api::MemoryDeviceStatus| device.plugged_bytes == 512 * MIB;
    assert!(devices.iter().all(is_half), "{report:?}, {devices:?}");
}

/// Devices without a name, in a VM that somebody else started.
#[test]
fn a_vm_that_others_started() {
    let devices = "-m 1024M,slots=0,maxmem=3G \
        -object memory-backend-memfd,id=more,size=2G,share=on,reserve=off \
        -device virtio-mem-pci,memdev=more -device virtio-balloon-pci,free-page-reporting=on";
    let guest = Guest::debian("6.1-cloud").append(MOVABLE).qemu_args(devices);
    let vm = Host::new().qemu(guest);
    let began_bytes = total_bytes(&vm);
    vm.attach();
    let balloon = vm.status().balloon.expect("a balloon");
    assert!(balloon.reporting_offered && !balloon.deflates_on_oom, "{balloon:?}");
    assert_eq!(balloon.reporting, Some(true));
    reach(&vm, "1536M");
    wait_total(&vm, began_bytes + 512 * MIB);
    vm.guest("fill a 1100M");
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("free a");
    reach(&vm, "600M");
    assert!(vm.host_bytes() < 600 * MIB + OTHERS_BYTES, "{}", vm.host_bytes());
    vm.detach();
    let figures = "guest-stats-polling-interval";
    let interval = vm.qmp(
        "qom-get",
        json!({ "path": "/machine/peripheral-anon/device[1]", "property": figures }),
    );
    assert_eq!(interval, 0);
    // All memory of the balloon is the guest's again.
    until("the guest's memory", || {
        let text = vm.guest("cat /proc/meminfo");
        (field_bytes(&text, "MemFree:") > 700 * MIB).then_some(())
    });
}
