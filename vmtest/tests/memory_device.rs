//! The virtio-mem device served by `ebbd memory`, with Linux's own driver, under QEMU 11.

use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use ebb_api::{DeviceServer, SizeState, SizeStatus, VmStatus};
use ebb_vm::Qmp;
use serde_json::json;
use vmtest::{
    Guest, Host, MemoryDevice, Ran, Vm, assets, busy_for, permit, require, rounds, until,
    until_fits,
};

const MIB: u64 = 1 << 20;
/// Address of the pluggable memory of a VM of 512 MiB that Ebb started.
const ADDRESS: u64 = 5 << 30;
/// Most memory that the guest's kernel takes for itself of what it gets: mainly page metadata.
const OVERHEAD: u64 = 64 * MIB;

fn here() -> Result<Host, String> {
    assets::qemu11()?;
    assets::kernel("6.1-cloud")?;
    Host::in_memory()
}

/// A VM of 512 MiB with a device of 4 GiB.
struct Bench {
    vm: Vm,
    device: MemoryDevice,
}

impl Bench {
    fn new(host: &Host, options: &str) -> Bench {
        let device = MemoryDevice::new(host, "4G", options);
        let guest = Guest::debian("6.1-cloud")
            .memory("512M")
            .append("memhp_default_state=online_movable")
            .qemu_in(&assets::qemu11().expect("required"))
            .served_memory(&device);
        Bench { vm: host.qemu(guest), device }
    }

    /// Total memory as the guest's kernel reports it.
    fn guest_bytes(&self) -> u64 {
        total_bytes(&self.vm)
    }

    /// Waits until the guest has `more` bytes more than `base`.
    fn wait_guest(&self, base: u64, more: u64) {
        until(format_args!("{more} bytes more in the guest"), || {
            let now = self.guest_bytes();
            (now + OVERHEAD >= base + more && now <= base + more).then_some(())
        });
    }
}

fn total_bytes(vm: &Vm) -> u64 {
    let text = vm.guest("cat /proc/meminfo");
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = kib.and_then(|rest| rest.trim().strip_suffix(" kB")).expect("MemTotal");
    kib.parse::<u64>().expect("a number") * 1024
}

#[test]
fn memory_comes_and_goes() {
    let host = here();
    require!(host.as_ref().map_err(Clone::clone));
    let host = host.expect("required");
    let mut bench = Bench::new(&host, "");
    let base = bench.guest_bytes();
    assert_eq!(bench.device.host_bytes(), 0);
    bench.device.resize("1G");
    bench.wait_guest(base, 1 << 30);
    // More than it began with, so it is in the region.
    bench.vm.guest("fill a 1000M");
    let bytes = bench.device.host_bytes();
    assert!((488 * MIB..=1 << 30).contains(&bytes), "{bytes} bytes");
    assert_eq!(bench.vm.guest("check a"), "0");
    bench.vm.guest("free a");
    for size in ["130M", "770M", "256M"] {
        bench.device.resize(size);
        let plugged = bench.device.sizes().plugged_bytes;
        bench.wait_guest(base, plugged);
        assert!(bench.device.host_bytes() <= plugged, "more memory than is plugged");
        bench.vm.guest("fill a 400M");
        assert_eq!(bench.vm.guest("check a"), "0");
        bench.vm.guest("free a");
    }
    bench.device.resize("0");
    bench.wait_guest(base, 0);
    assert_eq!(bench.device.host_bytes(), 0);
    assert_eq!(bench.device.sizes().violations, 0);
}

#[test]
fn plugged_memory_is_there_at_once_where_that_is_asked_for() {
    let host = here();
    require!(host.as_ref().map_err(Clone::clone));
    let host = host.expect("required");
    let mut bench = Bench::new(&host, "--prealloc --requested 64M");
    bench.device.wait_plugged();
    assert_eq!(bench.device.host_bytes(), 64 * MIB);
    bench.device.resize("300M");
    assert_eq!(bench.device.host_bytes(), 300 * MIB);
    bench.device.resize("0");
    assert_eq!(bench.device.host_bytes(), 0);
}

#[test]
fn killed_servers_lose_nothing() {
    let host = here();
    require!(host.as_ref().map_err(Clone::clone));
    let host = host.expect("required");
    let mut bench = Bench::new(&host, "");
    let base = bench.guest_bytes();
    bench.device.resize("512M");
    bench.vm.churn("400M");
    for round in 0..u64::from(rounds(4, 100)) {
        let size = ["1G", "600M", "800M", "512M"][round as usize % 4];
        assert_eq!(bench.device.request(size).error, None);
        busy_for(Duration::from_millis(round * 37 % 211));
        bench.device.kill9();
        busy_for(Duration::from_millis(round * 17 % 53));
        bench.device.start();
        bench.device.wait_plugged();
    }
    assert_eq!(bench.vm.churn_stop().wrong_bytes, 0);
    bench.device.resize("0");
    bench.wait_guest(base, 0);
    assert_eq!(bench.device.host_bytes(), 0);
}

/// The driver unplugs what it finds plugged, and plugs what is requested. If the server is dead, it
/// does so as soon as there is one.
#[test]
fn a_reboot_brings_the_memory_back() {
    let host = here();
    require!(host.as_ref().map_err(Clone::clone));
    let host = host.expect("required");
    let mut bench = Bench::new(&host, "");
    let base = bench.guest_bytes();
    bench.device.resize("768M");
    bench.wait_guest(base, 768 * MIB);
    bench.vm.guest("fill a 900M");
    let before = bench.device.host_bytes();
    for (size, late) in [("768M", false), ("256M", true)] {
        bench.device.request(size);
        let Bench { vm, device } = &mut bench;
        if late {
            device.kill9();
        }
        thread::scope(|scope| {
            let reboot = scope.spawn(|| vm.reboot());
            if late {
                busy_for(Duration::from_secs(2));
                device.start();
            }
            reboot.join().expect("the guest boots");
        });
        bench.device.wait_plugged();
        let plugged = bench.device.sizes().plugged_bytes;
        bench.wait_guest(base, plugged);
        let bytes = bench.device.host_bytes();
        assert!(bytes < before, "what the old kernel had was removed: {bytes} of {before} bytes");
    }
}

#[test]
fn bad_sizes_and_arguments_are_refused_with_the_reason() {
    let host = Host::in_memory();
    require!(host.as_ref().map_err(Clone::clone));
    let host = host.expect("required");
    let mut device = MemoryDevice::new(&host, "4G", "");
    for (size, why) in [("3M", "multiple"), ("5G", "at most"), ("much", "no size")] {
        let error = device.request(size).error.expect("it is refused");
        assert!(error.contains(why), "{error}");
    }
    assert_eq!(device.request("1G").requested_bytes, 1 << 30);
    // Another server for it is refused, because of its state file and its socket.
    let why = Ran::of(device.command().stdin(Stdio::null())).refused();
    assert!(why.contains("another process serves this device"), "{why}");
    device.kill9();
    for (arguments, why) in [
        (&["--size", "3M"][..], "multiples of its blocks"),
        (&["--block", "3M"], "power of two"),
        (&["--address", "here"], "no address"),
        (&["--file", "/etc/hostname"], "on a disk"),
        (&["--size", "2G"], "another region"),
    ] {
        let mut command = device.command();
        let error = Ran::of(command.args(arguments).stdin(Stdio::null()));
        assert_ne!(error.code, Some(0));
        assert!(error.stderr.contains(why), "{}", error.stderr);
    }
}

/// A managed VM whose device Ebb serves.
fn managed(host: &Host, mode: &str, with: impl FnOnce(Guest) -> Guest) -> Vm {
    let guest = Guest::debian("6.1-cloud")
        .memory("512M")
        .grow_to("2560M")
        .mode(mode)
        .append("memhp_default_state=online_movable")
        .qemu_in(&assets::qemu11().expect("required"));
    host.run(with(guest))
}

fn size(vm: &Vm) -> SizeStatus {
    vm.status().size
}

fn reach(vm: &Vm, size_mib: u64) {
    vm.ebb(&format!("resize {size_mib}M")).ok_or_short();
    until(format_args!("a size of {size_mib} MiB"), || {
        let size = size(vm);
        (size.state == SizeState::Reached && size.bytes == size_mib * MIB).then_some(())
    });
}

/// Reads the region where nothing is plugged, as nobody in the guest would.
fn touch_unplugged(vm: &Vm, touches: u64) {
    for index in 0..touches {
        let line = format!("xp /1xg {:#x}", ADDRESS + (1 + index) * 64 * MIB);
        vm.qmp("human-monitor-command", json!({ "command-line": line }));
    }
}

fn violations(vm: &Vm) -> Option<u64> {
    size(vm).devices.first().and_then(|device| device.violations)
}

/// Waits until exactly so many violations are told. A status may tell the size of a moment ago.
fn wait_violations(vm: &Vm, count: u64) {
    let wanted = format!("{count} violations");
    until_fits(wanted, || violations(vm), |&found| found == Some(count));
}

#[test]
fn a_managed_vm_grows_by_a_device_of_ebbs() {
    let host = here().map(|_| Host::new());
    require!(host.as_ref().map_err(Clone::clone));
    let host = host.expect("required");
    for mode in ["release", "strict"].into_iter().take(rounds(1, 2) as usize) {
        let vm = managed(&host, mode, |guest| guest);
        let before = size(&vm);
        assert_eq!((before.bytes, before.max_bytes), (512 * MIB, 2560 * MIB));
        assert_eq!(before.devices[0].served_by, DeviceServer::Ebb);
        reach(&vm, 1280);
        assert_eq!(size(&vm).plugged_bytes, 768 * MIB);
        assert!(vm.host_bytes() < 512 * MIB + OVERHEAD, "nothing is taken before it is touched");
        // The device has it before Linux has put it online.
        until("all of it in the guest", || (total_bytes(&vm) > 1150 * MIB).then_some(()));
        vm.guest("fill a 1000M");
        assert!(vm.host_bytes() > 1000 * MIB);
        // The device is served again by the next daemon.
        host.kill9();
        host.start();
        assert_eq!(size(&vm).plugged_bytes, 768 * MIB);
        assert_eq!(vm.guest("check a"), "0");
        vm.wait_trusted();
        vm.ebb("limit 700M").ok();
        assert_eq!(vm.guest("check a"), "0");
        vm.guest("free a");
        reach(&vm, 512);
        vm.ebb("limit off").ok();
        assert!(vm.host_bytes() < 512 * MIB + OVERHEAD, "{}", vm.host_bytes());
        assert_eq!(violations(&vm), Some(0));
        reach(&vm, 768);
        vm.guest("fill b 250M");
        vm.reboot();
        until("the size to be reached again", || {
            let size = size(&vm);
            (size.plugged_bytes == 256 * MIB && size.state == SizeState::Reached).then_some(())
        });
        vm.guest("fill b 250M");
        assert_eq!(vm.guest("check b"), "0");
        assert_eq!(violations(&vm), Some(0));
        let why = vm.ebb("detach").refused();
        assert!(why.contains("serves this VM's virtio-mem devices"), "{why}");
    }
}

#[test]
fn every_touch_of_what_is_not_plugged_is_counted() {
    let host = here().map(|_| Host::new());
    require!(host.as_ref().map_err(Clone::clone));
    let vm = managed(&host.expect("required"), "release", |guest| guest.grow_prealloc());
    touch_unplugged(&vm, 20);
    wait_violations(&vm, 20);
    assert_eq!(vm.status().sharing.stopped, None);
    // The memory that these touches were given is reclaimed.
    reach(&vm, 1024);
    assert!(vm.host_bytes() >= 512 * MIB, "what is plugged is there at once");
    vm.ebb("resize 512M --on-violation stop").ok_or_short();
    reach(&vm, 512);
    assert!(vm.host_bytes() < 512 * MIB + OVERHEAD, "{}", vm.host_bytes());
    touch_unplugged(&vm, 1);
    until("the VM to be stopped", || vm.status().sharing.stopped);
    wait_violations(&vm, 21);
    let state = vm.qmp("query-status", json!({}));
    assert_eq!(state["status"], "paused", "{state}");
    vm.qmp("cont", json!({}));
    vm.guest("fill a 100M");
    assert_eq!(vm.guest("check a"), "0");
}

/// The process ends before the VM is managed. The next one must not take the region for memory that
/// the guest may use.
#[test]
fn a_vm_whose_start_was_cut_off_has_nothing_plugged() {
    let host = here().map(|_| Host::new());
    require!(host.as_ref().map_err(Clone::clone));
    let host = host.expect("required");
    let qemu = assets::for_all_users(&assets::qemu11().expect("required"));
    host.set("EBB_QEMU", qemu.join("qemu-system-x86_64"));
    host.set("EBB_FAIL", "cut:begin:1");
    let place = host.directory().join("cut");
    fs::create_dir(&place).expect("a directory");
    permit(&place, 0o777);
    let socket = place.join("test.sock");
    let qmp = format!("-qmp unix:{},server=on,wait=off", socket.display());
    let run = format!("run --name cut --memory 512M --grow-to 2560M -- -S {qmp}");
    let why = host.ebb(&run).refused();
    assert!(why.contains("ended without an answer"), "{why}");
    host.start();
    let mut qmp = Qmp::connect(&socket).expect("QEMU listens");
    qmp.human(&format!("xp /1xg {:#x}", ADDRESS + 64 * MIB)).expect("QEMU answers");
    until("the violation to be counted", || {
        let status = host.ebb("status cut --json").ok();
        let status: VmStatus = serde_json::from_str(&status).expect("a status");
        let device = status.size.devices.first()?;
        (device.served_by == DeviceServer::Ebb && device.violations == Some(1)).then_some(())
    });
}
