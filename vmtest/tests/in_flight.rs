//! Memory is evicted while QEMU's own disk, without the host's page cache, still writes to it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ebb_api::EvictReport;
use ebb_units::FRAME_BYTES;
use serde_json::json;
use vmtest::{Guest, Host, SlowDisk, Vm, assets, require, rounds, slow_disks, until};

/// Requests a second: each takes many times longer than an eviction.
const REQUESTS: u32 = 25;
/// Less than a guest uses that reads the drive, more than its kernel needs.
const LIMIT_BYTES: u64 = 72 << 20;
const KINDS: [&str; 3] = ["ext4", "xfs", "btrfs"];
const AIO: [&str; 3] = ["native", "io_uring", "threads"];
/// Prints the digest of many small files, for which the file system reads its metadata.
const SMALL_FILES: &str = "sh cd /mnt/d && busybox cat $(busybox ls) | busybox md5sum";

/// Adds a disk of QEMU's own that bypasses the host's page cache.
fn with_drive(guest: Guest, disk: &SlowDisk, aio: &str) -> Guest {
    let device = disk.device().display();
    guest.qemu_args(&format!("-drive file={device},if=virtio,format=raw,cache=none,aio={aio}"))
}

/// A guest whose QEMU runs as root, so that it may open loop devices.
fn small_guest(label: &str) -> Guest {
    Guest::debian(label).memory("256M").backing("small").user("root")
}

/// How memory in use is evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    /// By `ebb evict`, repeatedly.
    Force,
    /// By `ebb limit`, on and off in turns.
    Limit,
}

impl By {
    /// Evicts once. Returns the number of frames evicted.
    fn take(self, vm: &Vm) -> u64 {
        match self {
            By::Force => evict(vm),
            By::Limit => limit(vm),
        }
    }
}

/// Evicts memory in use repeatedly while the guest works.
fn while_evicted(vm: &Vm, by: By, work: impl FnOnce()) {
    let ends = AtomicBool::new(false);
    let evicted = thread::scope(|scope| {
        let evicts = scope.spawn(|| {
            let mut evicted = 0;
            while !ends.load(Ordering::Relaxed) {
                evicted += by.take(vm);
            }
            evicted
        });
        // Ends the eviction also if the work fails.
        let end = Ended(&ends);
        work();
        drop(end);
        evicts.join().expect("it evicts")
    });
    eprintln!("{evicted} evicted, {by:?}");
    assert!(evicted > 0, "nothing was evicted");
}

struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn evict(vm: &Vm) -> u64 {
    let report = vm.ebb("evict --bytes 1G --json").ok();
    serde_json::from_str::<EvictReport>(&report).expect("a report").saved_frames
}

/// Sets a limit, until it holds or nothing more can be evicted.
fn limit(vm: &Vm) -> u64 {
    vm.ebb(&format!("limit {}M", LIMIT_BYTES >> 20)).ok();
    let limit = until("the limit", || {
        let status = vm.status();
        let held = status.resident_bytes <= LIMIT_BYTES;
        (held || status.limit.stuck.is_some()).then_some(status.limit)
    });
    let is_told = |why: &String| !why.contains("nothing more") || why.contains("raise the limit");
    assert!(limit.stuck.as_ref().is_none_or(is_told), "{:?}", limit.stuck);
    vm.ebb("limit off").ok();
    let went = [limit.saved_total_bytes, limit.clean_total_bytes, limit.empty_total_bytes];
    went.iter().sum::<u64>() / FRAME_BYTES
}

/// Tests file data and metadata, read through the guest's cache and past it.
fn files(label: &str, kind: &str, aio: &str, by: By) {
    let host = Host::new();
    let disk = SlowDisk::new(&host, "slow", "512M").formatted(kind);
    let vm = host.run(with_drive(small_guest(label), &disk, aio));
    let files = Files::write(&vm, kind);
    vm.wait_trusted();
    disk.slow_down(vm.pid(), REQUESTS);
    while_evicted(&vm, by, || files.read(&vm, &format!("{label}, {kind}, {aio}, {by:?}")));
    vm.guest("umount /mnt");
    vm.power_off();
    disk.check(kind);
}

/// One large file, and many small ones.
struct Files {
    large: String,
    small: String,
}

impl Files {
    /// Writes the files to a disk that is not slow yet. None of them stays in the guest's cache.
    fn write(vm: &Vm, kind: &str) -> Files {
        let mount = format!("mount {kind} /dev/vda /mnt");
        vm.guest(&mount);
        vm.guest("files a 8M /mnt");
        vm.guest("sh mkdir /mnt/d; for i in $(busybox seq 50); do echo $i >/mnt/d/$i; done");
        let large = vm.guest("sh busybox md5sum </mnt/a.pattern");
        let files = Files { large, small: vm.guest(SMALL_FILES) };
        vm.guest("umount /mnt");
        vm.guest(&mount);
        files
    }

    fn read(&self, vm: &Vm, about: &str) {
        for round in 0..rounds(2, 4) {
            let about = format!("{about}: round {round}");
            vm.guest("dropcaches");
            assert_eq!(vm.guest("checkfiles a"), "0", "{about}");
            let direct = "sh busybox dd if=/mnt/a.pattern iflag=direct bs=4M | busybox md5sum";
            assert_eq!(vm.guest(direct), self.large, "{about}, past the page cache");
            assert_eq!(vm.guest(SMALL_FILES), self.small, "{about}, small files");
            vm.guest("sh busybox touch /mnt/d/1 && busybox sync");
        }
    }
}

#[test]
fn files_read_from_a_slow_drive() {
    require!(slow_disks());
    files("6.1-cloud", "ext4", "native", By::Force);
}

#[test]
fn files_read_from_a_slow_drive_under_a_limit() {
    require!(slow_disks());
    files("6.1-cloud", "ext4", "threads", By::Limit);
}

/// All combinations, in the long form: file systems, ways of I/O, kernels.
#[test]
fn files_of_all_kinds() {
    require!(slow_disks());
    if rounds(0, 1) == 0 {
        return;
    }
    for by in [By::Force, By::Limit] {
        for kind in KINDS {
            for aio in AIO {
                files("6.1-cloud", kind, aio, by);
            }
        }
        for label in ["5.10", "6.12", "7.x"] {
            require!(assets::kernel(label));
            files(label, "ext4", "native", by);
            files(label, "btrfs", "io_uring", by);
        }
    }
}

/// Tests a guest that itself swaps to a slow drive.
fn swap(label: &str, aio: &str, by: By) {
    let host = Host::new();
    let disk = SlowDisk::new(&host, "swap", "512M");
    let vm = host.run(with_drive(small_guest(label), &disk, aio));
    vm.guest("sh busybox mkswap /dev/vda && busybox swapon /dev/vda");
    vm.wait_trusted();
    vm.guest("fill a 60M");
    disk.slow_down(vm.pid(), 4 * REQUESTS);
    while_evicted(&vm, by, || {
        for round in 0..rounds(1, 4) {
            // The guest has to make room for this, by swapping.
            vm.guest("sh busybox dd if=/dev/zero of=/dev/null bs=160M count=1");
            assert_eq!(vm.guest("check a"), "0", "{label}, {aio}, {by:?}: round {round}");
        }
    });
    let swapped = vm.guest("cat /proc/vmstat");
    let pages =
        |name| swapped.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    assert!(pages("pswpin ").is_some_and(|pages: u64| pages > 0), "the guest swaps: {swapped}");
}

#[test]
fn a_guest_swaps_to_a_slow_drive() {
    require!(slow_disks());
    for aio in AIO.iter().take(rounds(1, 3) as usize) {
        swap("6.1-cloud", aio, By::Force);
    }
    for aio in AIO.iter().take(rounds(0, 3) as usize) {
        swap("6.1-cloud", aio, By::Limit);
    }
}

/// While memory is evicted because no device pins any, a drive is plugged in that does.
#[test]
fn a_slow_drive_is_plugged_in() {
    require!(slow_disks());
    let host = Host::new();
    let disk = SlowDisk::new(&host, "slow", "64M");
    let guest = small_guest("6.1-cloud").qemu_args("-device pcie-root-port,id=plug0,chassis=1");
    let vm = host.run(guest);
    vm.wait_trusted();
    disk.slow_down(vm.pid(), REQUESTS);
    while_evicted(&vm, By::Force, || {
        let node = json!({"driver": "host_device", "node-name": "slow", "aio": "native",
            "filename": disk.device(), "cache": {"direct": true}});
        vm.qmp("blockdev-add", node);
        vm.qmp("device_add", json!({"driver": "virtio-blk-pci", "bus": "plug0", "drive": "slow"}));
        until("the drive", || vm.try_guest("cat /sys/block/vda/size").ok());
        assert_eq!(vm.guest("disk /dev/vda 12M"), "0");
    });
}

/// If Ebb does not know the guest, nobody tells what is in flight to it.
#[test]
fn nothing_of_an_unknown_guest_is_evicted() {
    require!(slow_disks());
    let host = Host::new();
    let disk = SlowDisk::new(&host, "slow", "64M");
    let vm = host.run(with_drive(small_guest("6.1-cloud"), &disk, "native"));
    vm.wait_trusted();
    vm.ebb("evict --bytes 1M").ok();
    vm.ebb("limit 100M").ok();
    // Before its first instruction, no kernel runs.
    vm.qmp("stop", json!({}));
    vm.qmp("system_reset", json!({}));
    // QEMU resets the machine after it has answered.
    until("the reset", || {
        let status = vm.qmp("query-status", json!({}));
        (status["status"] == "prelaunch").then_some(())
    });
    let why = vm.ebb("evict --bytes 1G").refused();
    assert!(why.contains("is open with O_DIRECT") && why.contains("not trusted"), "{why}");
    let why = vm.ebb("limit 100M").refused();
    assert!(why.contains("is open with O_DIRECT") && why.contains("not trusted"), "{why}");
    // Until then, the VM may have had nothing more to evict.
    let stuck = || vm.status().limit.stuck.filter(|why| why.contains("not trusted"));
    let why = until("the limit that was set to wait", stuck);
    assert!(why.contains("is open with O_DIRECT"), "{why}");
}
