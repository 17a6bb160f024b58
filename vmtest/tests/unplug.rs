//! Memory devices that are unplugged from a VM while Ebb manages it. Ebb drops what it had of them
//! and serves everything else, and so does the next daemon.

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ebb_api::{EvictReport, VmStatus};
use ebb_sys::process::Process;
use ebb_vm::Qmp;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use vmtest::{Disk, Guest, Host, Vm, until};

const MIB: u64 = 1 << 20;
const DIMM_BYTES: u64 = 256 * MIB;
const MAIN_BYTES: u64 = 512 * MIB;
/// Linux uses the memory of such devices first, and can do without it later.
const MOVABLE: &str = "memhp_default_state=online_movable";
/// Time after which a guest has given a device back, or will not without another request: a guest
/// on a busy host first reads back what is evicted of it.
const ASK_AGAIN: Duration = Duration::from_secs(60);
const ROOM: &str = "-m slots=4,maxmem=4G";
/// An address within that room, apart from where QEMU puts the first device.
const OTHER_ADDRESS: u64 = 6 << 30;

fn guest() -> Guest {
    Guest::debian("6.1-cloud").memory("512M").append(MOVABLE).qemu_args(ROOM)
}

fn total_bytes(vm: &Vm) -> u64 {
    let text = vm.guest("cat /proc/meminfo");
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = kib.and_then(|rest| rest.trim().strip_suffix(" kB")).expect("MemTotal");
    kib.parse::<u64>().expect("a number") * 1024
}

/// Waits until the guest uses this many devices.
fn wait_dimms(vm: &Vm, count: u64) {
    let bytes = MAIN_BYTES + count * DIMM_BYTES;
    until(format_args!("{count} memory devices in the guest"), || {
        (total_bytes(vm).abs_diff(bytes) < DIMM_BYTES / 2).then_some(())
    });
}

fn plug(vm: &Vm, number: u32) {
    let (object, device) = (format!("mem{number}"), format!("dimm{number}"));
    vm.qmp(
        "object-add",
        json!({ "qom-type": "memory-backend-memfd", "id": object, "size": DIMM_BYTES, "share": true }),
    );
    vm.qmp("device_add", json!({ "driver": "pc-dimm", "id": device, "memdev": object }));
}

fn memory_devices(qmp: &mut Qmp) -> usize {
    let devices = qmp.execute("query-memory-devices", json!({})).expect("QMP");
    devices.as_array().map_or(0, Vec::len)
}

/// Has the guest give a device back. Its memory stays in QEMU.
fn unplug(vm: &Vm, number: u32) {
    let mut qmp = vm.open_qmp();
    let before = memory_devices(&mut qmp);
    let mut asked: Option<Instant> = None;
    until(format_args!("dimm{number} to be unplugged"), || {
        // Linux may find a page that it cannot move at once. A second request before Linux has
        // handled the first one would eject the next device of that slot.
        if asked.is_none_or(|asked| asked.elapsed() > ASK_AGAIN) {
            let _ = qmp.execute("device_del", json!({ "id": format!("dimm{number}") }));
            asked = Some(Instant::now());
        }
        (memory_devices(&mut qmp) < before).then_some(())
    });
}

/// Removes its memory from QEMU.
fn delete(vm: &Vm, number: u32) {
    let object = json!({ "id": format!("mem{number}") });
    let mut qmp = vm.open_qmp();
    // The device ends after the answer to its request.
    until(format_args!("mem{number} to be deleted"), || {
        qmp.execute("object-del", object.clone()).ok()
    });
}

/// Evicts most of the VM. A part of that is freed in the guest, which nobody tells Ebb.
fn take(vm: &Vm) -> VmStatus {
    vm.guest("fill kept 60M");
    vm.guest("fill a 500M");
    vm.ebb("evict --bytes 2147483648").ok();
    vm.guest("free a");
    let status = vm.status();
    assert!(status.limit.saved_bytes > MAIN_BYTES, "{:?}", status.limit);
    status
}

/// Checks that `unplugged` devices were dropped, and with them what was saved of them.
fn assert_released(vm: &Vm, unplugged: u64, dimms: u64) -> VmStatus {
    let status = until(format_args!("{unplugged} devices to be released"), || {
        Some(vm.status()).filter(|status| status.unplugged_bytes == unplugged * DIMM_BYTES)
    });
    assert_eq!(status.memory_bytes, MAIN_BYTES + dimms * DIMM_BYTES);
    let saved = status.limit.saved_bytes + status.limit.clean_bytes;
    assert!(saved <= status.memory_bytes, "{:?}", status.limit);
    assert_eq!(vm.guest("check kept"), "0");
    status
}

fn on_record(vm: &Vm) -> Vec<bool> {
    let path = vm.host().run_directory().join("vms").join(vm.name()).join("vm.json");
    let record: Value =
        serde_json::from_slice(&std::fs::read(path).expect("a record")).expect("JSON");
    let regions = record["regions"].as_array().expect("regions").iter();
    regions.map(|region| region["gone"] == true).collect()
}

#[test]
fn memory_that_is_plugged_in_later_is_warned_of() {
    let host = Host::new();
    let vm = host.qemu(guest());
    vm.attach();
    let warned = |name: &str| {
        until(format_args!("a warning of {name}"), || {
            let warnings = vm.status().warnings;
            warnings
                .into_iter()
                .find(|line| line.contains("plugged in after") && line.contains(name))
        })
    };
    assert!(!vm.status().warnings.iter().any(|line| line.contains("plugged in after")));
    // Memory of QEMU's alone, which no descriptor shows.
    let private = json!({ "qom-type": "memory-backend-ram", "id": "own", "size": DIMM_BYTES });
    vm.qmp("object-add", private);
    vm.qmp("device_add", json!({ "driver": "pc-dimm", "id": "private", "memdev": "own" }));
    assert!(warned("private").contains("256 MiB"));
    plug(&vm, 0);
    assert!(warned("and 1 more").contains("512 MiB"));
    // The next daemon finds it out by itself.
    host.kill9();
    host.start();
    warned("and 1 more");
    assert_eq!(vm.status().memory_bytes, MAIN_BYTES);
    assert_eq!(vm.guest("ping"), "done");
}

#[test]
fn devices_leave_a_vm_that_was_attached() {
    let host = Host::new();
    let vm = host.qemu(guest());
    plug(&vm, 0);
    plug(&vm, 1);
    wait_dimms(&vm, 2);
    vm.attach();
    vm.wait_trusted();
    let before = take(&vm);
    assert_eq!((before.memory_bytes, before.unplugged_bytes), (MAIN_BYTES + 2 * DIMM_BYTES, 0));

    // As long as QEMU has it, it may be plugged in again.
    unplug(&vm, 1);
    let half = vm.status();
    assert_eq!((half.memory_bytes, half.unplugged_bytes), (before.memory_bytes, 0));
    delete(&vm, 1);
    let after = assert_released(&vm, 1, 1);
    assert!(after.limit.saved_bytes + 100 * MIB < half.limit.saved_bytes, "{after:?}");
    assert_eq!(on_record(&vm).iter().filter(|unplugged| **unplugged).count(), 1);
    host.kill9();
    host.start();
    assert_released(&vm, 1, 1);

    // No daemon sees the second one unplugged.
    unplug(&vm, 0);
    host.kill9();
    delete(&vm, 0);
    host.start();
    let last = assert_released(&vm, 2, 0);
    assert!(last.limit.saved_bytes <= MAIN_BYTES, "{last:?}");
    assert!(on_record(&vm).iter().filter(|unplugged| **unplugged).count() == 2);
    until("the swap file to be no larger than what is left", || {
        (vm.status().limit.swap_file_bytes <= MAIN_BYTES).then_some(())
    });
    assert_stays_away_from_others(&host, &vm);
}

/// Checks that a new device with the same name and address is the guest's, not Ebb's.
fn assert_stays_away_from_others(host: &Host, vm: &Vm) {
    plug(vm, 0);
    wait_dimms(vm, 1);
    vm.guest("fill b 200M");
    vm.wait_trusted();
    vm.ebb("evict --bytes 2147483648").ok();
    vm.reclaim();
    assert_eq!(vm.status().memory_bytes, MAIN_BYTES);
    assert_eq!((vm.guest("check b"), vm.guest("check kept")), ("0".into(), "0".into()));
    host.kill9();
    host.start();
    assert_eq!((vm.guest("check b"), vm.guest("check kept")), ("0".into(), "0".into()));
    vm.detach();
    assert_eq!((vm.guest("check b"), vm.guest("check kept")), ("0".into(), "0".into()));
}

#[test]
fn a_device_leaves_a_vm_that_ebb_started() {
    let host = Host::new();
    let backend = format!("memory-backend-memfd,id=mem0,size={DIMM_BYTES},share=on");
    let words = format!("-object {backend} -device pc-dimm,id=dimm0,memdev=mem0");
    let vm = host.run(guest().mode("strict").qemu_args(&words));
    wait_dimms(&vm, 1);
    vm.wait_trusted();
    vm.guest("fill kept 60M");
    vm.guest("fill a 400M");
    // Some frames are protected, some are saved.
    vm.ebb("limit 160M").ok();
    vm.guest("free a");
    vm.reclaim();
    unplug(&vm, 0);
    delete(&vm, 0);
    assert_released(&vm, 1, 0);
    vm.guest("fill a 200M");
    assert_eq!((vm.guest("check a"), vm.guest("check kept")), ("0".into(), "0".into()));
    host.kill9();
    host.start();
    assert_released(&vm, 1, 0);
    assert_eq!(vm.guest("check a"), "0");
    vm.ebb("limit off").ok();
    vm.detach();
    assert_eq!((vm.guest("check a"), vm.guest("check kept")), ("0".into(), "0".into()));
}

/// The memory is the same, at an address that Ebb does not know: Ebb's disks read and write it
/// there.
#[test]
fn a_device_returns_at_another_address_beside_ebbs_disk() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let backend = format!("memory-backend-memfd,id=mem0,size={DIMM_BYTES},share=on");
    let words = format!("-object {backend} -device pc-dimm,id=dimm0,memdev=mem0");
    let vm = host.run(guest().own_disk(&disk).qemu_args(&words));
    wait_dimms(&vm, 1);
    unplug(&vm, 0);
    let device =
        json!({ "driver": "pc-dimm", "id": "dimm0", "memdev": "mem0", "addr": OTHER_ADDRESS });
    vm.qmp("device_add", device);
    wait_dimms(&vm, 1);
    vm.guest("mount ext4 /dev/vda /mnt");
    // What was written stays in the guest's memory for now.
    for (name, percent) in [("dirty_ratio", 90), ("dirty_background_ratio", 80)] {
        vm.guest(&format!("write /proc/sys/vm/{name} {percent}"));
    }
    vm.guest("files a 200M /mnt");
    let report = vm.ebb("evict --bytes 2147483648 --json").ok();
    let report: EvictReport = serde_json::from_str(&report).expect("a report");
    assert!(report.saved_bytes > DIMM_BYTES, "{report:?}");
    vm.guest("sh busybox sync");
    vm.guest("dropcaches");
    vm.ebb("evict --bytes 2147483648").ok();
    assert_eq!(vm.guest("checkfiles a"), "0");
    vm.guest("umount /mnt");
    vm.power_off();
    disk.check("ext4");
}

/// The memfd of its only memory device.
fn dimm_memfd(vm: &Vm) -> std::fs::File {
    let process = Process::open(vm.pid()).expect("QEMU runs");
    let open = process.descriptors().expect("descriptors");
    let files = open.into_iter().filter(|(_, link)| link.starts_with("/memfd:"));
    let mut files =
        files.map(|(fd, _)| std::fs::File::from(process.descriptor(fd).expect("a memfd")));
    let is_dimm = |file: &std::fs::File| file.metadata().expect("a size").len() == DIMM_BYTES;
    files.find(is_dimm).expect("its memfd")
}

/// Has QEMU keep a descriptor, whatever happens to the device.
fn keep_open(vm: &Vm, file: OwnedFd) {
    let mut stream = UnixStream::connect(vm.qmp_socket()).expect("QMP");
    let mut lines = BufReader::new(stream.try_clone().expect("a socket")).lines();
    let mut line = || lines.next().expect("an answer").expect("a line");
    assert!(line().contains("QMP"));
    stream.write_all(b"{\"execute\":\"qmp_capabilities\"}\n").expect("sent");
    assert!(line().contains("return"));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let file = [file.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&file)));
    let words = IoSlice::new(b"{\"execute\":\"add-fd\"}\n");
    sendmsg(&stream, &[words], &mut control, SendFlags::empty()).expect("sent");
    until("the descriptor to be taken", || line().contains("fdset-id").then_some(()));
}

/// Nobody has such memory mapped, and QEMU could map it again. It must not break a limit or a
/// detach, and all of its content must be in its file.
#[test]
fn memory_that_is_mapped_nowhere_is_in_its_file() {
    let vm = Host::new().qemu(guest());
    plug(&vm, 0);
    wait_dimms(&vm, 1);
    // Taken before Ebb looks, so it is not the descriptor that QEMU closes with the memory.
    let file = dimm_memfd(&vm);
    keep_open(&vm, file.as_fd().try_clone_to_owned().expect("a copy"));
    vm.attach();
    vm.wait_trusted();
    take(&vm);
    let resident = || file.metadata().expect("blocks").blocks() * 512;
    let before = resident();
    unplug(&vm, 0);
    delete(&vm, 0);
    until("its content to come back", || (resident() > before + 64 * MIB).then_some(()));
    assert_eq!(
        (vm.status().unplugged_bytes, vm.status().memory_bytes),
        (0, MAIN_BYTES + DIMM_BYTES)
    );
    vm.ebb("evict --bytes 2147483648").ok();
    assert_eq!(vm.guest("check kept"), "0");
    vm.detach();
    assert_eq!(vm.guest("check kept"), "0");
}
