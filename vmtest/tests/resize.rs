//! A VM grows and shrinks by QEMU's balloon and virtio-mem.

use ebb_api::{DriverState, ResizeReport, SizeMechanism, SizeState, SizeStatus};
use serde_json::json;
use vmtest::{Disk, Guest, Host, Vm, assets, require, rounds, until};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MOVABLE: &str = "memhp_default_state=online_movable";
/// Slack for memory of others that cannot be told from the guest's own: firmware, and what QEMU
/// itself touches.
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

#[test]
fn what_cannot_move_is_told_and_left_alone() {
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
    assert!(report.stopped_by.ends_with("are sought no more"), "{report:?}");
    assert_eq!(resize(&vm, "off").stopped_by, "no size was sought");
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
    for (line, told) in [
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
        assert!(why.contains(told), "{line}: {why}");
        assert_eq!(size(&vm), before, "{line}");
    }
    unbind(&vm, "virtio_balloon");
    unbind(&vm, "virtio_mem");
    let before = size(&vm);
    assert_eq!(before.devices[0].driver, DriverState::Absent);
    for (line, told) in [("600M", "driver virtio_balloon"), ("2G", "driver virtio_mem")] {
        let why = vm.ebb(&format!("resize {line}")).refused();
        assert!(why.contains(told), "{line}: {why}");
        assert_eq!(size(&vm), before, "{line}");
    }
    let other = host.qemu(Guest::debian("6.1-cloud").memory("512M"));
    other.attach();
    for (line, told) in [
        ("400M", "cannot have less than the 512 MiB it began with"),
        ("400M --by balloon", "no balloon"),
        ("1G", "start the VM with --grow-to"),
    ] {
        let why = other.ebb(&format!("resize {line}")).refused();
        assert!(why.contains(told), "{line}: {why}");
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

#[test]
fn a_rebooted_guest_has_its_size_again() {
    let vm = Host::new().run(growing());
    let began_bytes = total_bytes(&vm);
    for (wanted, total) in [("1536M", began_bytes + 512 * MIB), ("600M", began_bytes)] {
        let wanted_bytes = reach(&vm, wanted).bytes;
        vm.reboot();
        until("the size to be reached again", || {
            let now = size(&vm);
            (now.bytes == wanted_bytes && now.state == SizeState::Reached).then_some(())
        });
        wait_total(&vm, total);
        vm.guest("fill a 200M");
        assert_eq!(vm.guest("check a"), "0");
        vm.guest("free a");
    }
}

/// Nobody reports it: there is no reset, and the old kernel's metadata stays in memory.
#[test]
fn a_kernel_started_by_another_has_its_size_again() {
    let kernel = assets::kernel("6.1-cloud");
    require!(kernel.as_ref().map_err(Clone::clone));
    let kernel = kernel.expect("required");
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "256M").formatted("ext4").with_kernel(&kernel);
    let vm = host.run(growing().own_disk(&disk));
    let began_bytes = total_bytes(&vm);
    reach(&vm, "1536M");
    vm.ebb("auto on --interval 100ms").ok();
    for _ in 0..rounds(2, 20) {
        vm.wait_trusted();
        vm.guest("fill a 800M");
        vm.guest("free a");
        vm.guest("mount ext4 /dev/vda /mnt");
        vm.kexec("/mnt/vmlinuz", "/mnt/initrd");
        wait_total(&vm, began_bytes + 512 * MIB);
        vm.guest("fill a 800M");
        assert_eq!(vm.guest("check a"), "0");
        vm.guest("free a");
        vm.wait_trusted();
        until("the host to have back what is free", || (vm.host_bytes() < GIB).then_some(()));
    }
}

#[test]
fn a_daemon_that_comes_back_goes_on() {
    let host = Host::new();
    let vm = host.run(growing());
    for (line, wanted_bytes) in [("1536M", 1536 * MIB), ("600M", 600 * MIB), ("1G", GIB)] {
        let asking = std::thread::spawn({
            let (host, line) = (host.clone(), format!("resize vm0 {line}"));
            move || host.ebb(&line)
        });
        until("the size to be on record", || {
            let path = host.run_directory().join("vms/vm0/vm.json");
            let record: serde_json::Value =
                serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
            (record["size"]["bytes"] == wanted_bytes).then_some(())
        });
        host.kill9();
        let _ = asking.join().expect("ebb ends");
        host.start();
        until("the size to be reached", || (size(&vm).bytes == wanted_bytes).then_some(()));
    }
    vm.guest("fill a 500M");
    assert_eq!(vm.guest("check a"), "0");
}

/// Free memory is reclaimed from it as from other memory, while blocks come and go.
#[test]
fn plugged_memory_is_reclaimed_as_any_other() {
    for mode in ["strict", "release"].into_iter().take(rounds(1, 2) as usize) {
        let vm = Host::new().run(growing().mode(mode));
        vm.wait_trusted();
        let began_bytes = total_bytes(&vm);
        vm.churn("100M");
        for _ in 0..rounds(1, 4) {
            reach(&vm, "1536M");
            // QEMU has it before Linux has put it online.
            wait_total(&vm, began_bytes + 512 * MIB);
            vm.guest("fill a 1100M");
            vm.guest("free a");
            let before = vm.host_bytes();
            until("the free memory to be taken", || {
                vm.reclaim();
                (vm.host_bytes() + 800 * MIB < before).then_some(())
            });
            vm.churn_on(1);
            vm.ebb("auto on --interval 100ms").ok();
            vm.guest("fill a 900M");
            assert_eq!(vm.guest("check a"), "0");
            vm.guest("free a");
            reach(&vm, "1G");
            vm.churn_on(1);
            vm.ebb("auto off").ok();
        }
        assert_eq!(vm.churn_stop().wrong_bytes, 0);
        assert!(vm.host_bytes() < GIB + OTHERS_BYTES);
        vm.detach();
        vm.guest("fill a 500M");
        assert_eq!(vm.guest("check a"), "0");
    }
}

/// A limit covers plugged memory, too, and unplugging drops what is evicted of it.
#[test]
fn plugged_memory_is_held_at_a_limit() {
    let vm = Host::new().run(growing());
    vm.wait_trusted();
    let began_bytes = total_bytes(&vm);
    reach(&vm, "1536M");
    wait_total(&vm, began_bytes + 512 * MIB);
    vm.ebb("limit 700M").ok();
    vm.guest("fill a 1100M");
    assert_eq!(vm.guest("check a"), "0");
    assert!(vm.status().limit.saved_bytes > 300 * MIB);
    vm.guest("free a");
    reach(&vm, "1G");
    vm.ebb("limit off").ok();
    reach(&vm, "1536M");
    wait_total(&vm, began_bytes + 512 * MIB);
    vm.guest("fill b 1100M");
    assert_eq!(vm.guest("check b"), "0");
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
