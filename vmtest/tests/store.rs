//! Where evicted memory goes: compressed memory, the swap file, and a disk that is full.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_api::LimitStatus;
use tempfile::TempDir;
use vmtest::{Guest, Host, Ran, Vm, require, until};

const MIB: u64 = 1 << 20;

/// A host as it should be: its run directory is in memory, and its swap files are on a disk.
fn host(compressed: &str) -> Result<(Host, TempDir), String> {
    let (host, swap) =
        (Host::in_memory()?, tempfile::tempdir().map_err(|error| error.to_string())?);
    host.set("EBB_COMPRESSED", compressed);
    host.set("EBB_SWAP_DIR", swap.path());
    Ok((host, swap))
}

/// Host memory that the VM takes, compressed pages included.
fn taken_bytes(vm: &Vm) -> u64 {
    vm.host_bytes() + vm.status().limit.compressed_bytes
}

fn limit(vm: &Vm, mib: u64) -> LimitStatus {
    vm.ebb(&format!("limit {mib}M")).ok();
    until("the limit to hold", || (taken_bytes(vm) <= mib * MIB).then_some(()));
    vm.status().limit
}

#[test]
fn compressed_memory_is_a_part_of_the_limit() {
    let host = host("32M");
    require!(host.as_ref());
    let (host, _swap) = host.expect("it is there");
    let vm = host.run(Guest::debian("6.1-cloud").memory("1G"));
    vm.guest("fill soft 300M");
    let status = limit(&vm, 200);
    assert_eq!(status.compressed_limit_bytes, 32 * MIB);
    assert!(status.compressed_pages > 5000, "{status:?}");
    assert!(status.compressed_ratio > Some(3.0), "{status:?}");
    assert!(status.compressed_bytes <= 32 * MIB, "{status:?}");
    for _ in 0..2 {
        assert_eq!(vm.guest("check soft"), "0");
    }
    let shown = vm.ebb("status --verbose").ok();
    assert!(shown.contains("compressed    ") && shown.contains("of 32 MiB at most"), "{shown}");
    // Half of what the guest does not need to live.
    let status = limit(&vm, 80);
    assert_eq!(status.compressed_limit_bytes, 8 * MIB);
    assert_eq!(vm.guest("check soft"), "0");
    // QEMU was asked while its vCPU waited for locked frames: neither kept the other waiting.
    let log = fs::read_to_string(host.run_directory().join("ebbd.log")).expect("a log");
    assert!(!log.contains("do not all run the kernel"), "{log}");
    vm.detach();
    assert_eq!(vm.guest("check soft"), "0");
}

/// Pages that do not compress, and the oldest ones, are on the disk.
#[test]
fn the_oldest_are_written_back_and_the_daemon_may_die() {
    let host = host("16M");
    require!(host.as_ref());
    let (host, _swap) = host.expect("it is there");
    let vm = host.run(Guest::debian("6.1-cloud").memory("1G"));
    vm.guest("fill soft 300M");
    vm.guest("fill hard 100M");
    limit(&vm, 150);
    let status = until("the oldest to be written back", || {
        Some(vm.status().limit).filter(|status| status.written_back_total_bytes > 16 * MIB)
    });
    assert!(status.compressed_bytes <= 16 * MIB, "{status:?}");
    vm.churn("100M");
    for _ in 0..6 {
        vm.churn_on(1);
        host.kill9();
        host.start();
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    let before = vm.status().limit;
    assert!(before.compressed_pages > 0, "{before:?}");
    // Without compressed memory, its pages are moved out.
    host.kill9();
    host.set("EBB_COMPRESSED", "0");
    host.start();
    let is_empty =
        |status: &LimitStatus| status.compressed_pages == 0 && status.compressed_bytes == 0;
    until("compressed memory to be empty", || Some(vm.status().limit).filter(is_empty));
    assert_eq!(vm.guest("check soft"), "0");
    assert_eq!(vm.guest("check hard"), "0");
}

#[test]
fn compressed_memory_is_never_on_a_disk() {
    let host = Host::new();
    if fs::read_to_string("/proc/mounts").is_ok_and(|all| all.contains(" /tmp tmpfs")) {
        return vmtest::skip::record("compressed_memory_is_never_on_a_disk", "/tmp is tmpfs");
    }
    host.set("EBB_COMPRESSED", "64M");
    let why = Ran::of(&mut host.command("ebbd")).refused();
    assert!(why.contains("--compressed needs a run directory in memory"), "{why}");
    host.set("EBB_COMPRESSED", "64K");
    let why = Ran::of(&mut host.command("ebbd")).refused();
    assert!(why.contains("give 1 MiB or more, or 0"), "{why}");
}

/// A swap file of which the name is gone is reported while its content can still be had. The VM's
/// next process makes no new one, and goes on once the file is back.
#[test]
fn a_removed_swap_file_is_reported_and_never_made_anew() {
    let (host, disk) = (Host::new(), tempfile::tempdir().expect("a directory"));
    host.set("EBB_SWAP_DIR", disk.path());
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M"));
    vm.guest("fill a 200M");
    let evict = || {
        vm.ebb("limit 150M").ok();
        until("the limit to hold", || (vm.host_bytes() <= 150 * MIB).then_some(()));
    };
    evict();
    let file = fs::read_dir(disk.path()).expect("a directory").flatten().next();
    let swap = file.expect("a swap file").path();
    let kept = disk.path().join("kept");
    fs::hard_link(&swap, &kept).expect("one file system");
    fs::remove_file(&swap).expect("it is there");
    let warned = || vm.status().warnings.into_iter().find(|text| text.contains("was removed"));
    let warning = until("a warning", warned);
    assert!(warning.contains(&swap.display().to_string()), "{warning}");
    // A daemon with other settings restarts the processes of VMs, but not the only one that has this
    // file.
    host.kill_daemon();
    host.set("EBB_SWAP_MAX", "64G");
    let before = host.servers();
    host.start();
    assert_eq!(host.servers(), before);
    host.kill_servers();
    let missed = |why: &str| {
        until("the file to be missed", || host.ebb("list").ok().contains(why).then_some(()));
    };
    missed("there is no");
    assert!(!swap.exists(), "a new one would hide that the old one is missing");
    // Another file of that name is not this one, and stays as it is.
    fs::write(&swap, "another").expect("room");
    missed("is another file");
    assert_eq!(fs::read(&swap).expect("it is there"), b"another");
    // A copy is as good as the file.
    let copy = disk.path().join("copy");
    run(Command::new("cp").args(["--sparse=always"]).args([&kept, &copy])).expect("a copy");
    fs::rename(&copy, &swap).expect("one file system");
    assert_eq!(vm.guest("check a"), "0");
    assert_eq!(until("a status", || Some(warned())), None);
    // What the warning advises.
    fs::remove_file(&swap).expect("it is there");
    until("a warning", warned);
    vm.detach();
    assert_eq!(vm.guest("check a"), "0");
    let (name, pid, qmp) = (vm.name(), vm.pid(), vm.qmp_socket());
    host.ebb(&format!("attach --name {name} --pid {pid} --qmp {}", qmp.display())).ok();
    evict();
    assert_eq!(vm.guest("check a"), "0");
    // The next process of a VM that has nothing in it makes a new file.
    let other = host.run(Guest::debian("6.1-cloud").memory("128M"));
    let file = fs::read_dir(disk.path()).expect("a directory").flatten().map(|file| file.path());
    let others = file.into_iter().find(|path| path.to_string_lossy().contains(other.name()));
    let others = others.expect("a swap file");
    fs::remove_file(&others).expect("it is there");
    host.kill_servers();
    until("a new file", || others.exists().then_some(()));
    assert_eq!(vm.guest("check a"), "0");
}

/// An ext4 in a file of its own, of which only a given part is free.
struct Tight {
    directory: TempDir,
}

impl Tight {
    fn new(free_bytes: u64) -> Result<Tight, String> {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let tight = Tight { directory };
        let (image, mount) = (tight.path("image"), tight.path("mount"));
        let made = fs::create_dir(&mount)
            .and_then(|()| fs::File::create(&image))
            .and_then(|file| file.set_len(1 << 30));
        made.map_err(|error| error.to_string())?;
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount))?;
        let space = rustix::fs::statvfs(&mount).map_err(|error| error.to_string())?;
        let ballast = (space.f_bavail * space.f_frsize).saturating_sub(free_bytes);
        run(Command::new("fallocate").args(["-l", &ballast.to_string()]).arg(tight.ballast()))?;
        fs::create_dir(tight.swap()).map_err(|error| error.to_string())?;
        Ok(tight)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn ballast(&self) -> PathBuf {
        self.path("mount").join("ballast")
    }

    fn swap(&self) -> PathBuf {
        self.path("mount").join("swap")
    }
}

impl Drop for Tight {
    fn drop(&mut self) {
        // A daemon that is about to be killed may have files there.
        if let Err(why) = run(Command::new("umount").arg("--lazy").arg(self.path("mount"))) {
            eprintln!("{why}");
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let ran = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let why = String::from_utf8_lossy(&ran.stderr);
    ran.status.success().then_some(()).ok_or_else(|| format!("{command:?}: {why}"))
}

fn room(path: &Path) -> u64 {
    let space = rustix::fs::statvfs(path).expect("it is mounted");
    space.f_bavail * space.f_frsize
}

#[test]
fn a_full_disk_is_named_and_costs_the_guest_nothing() {
    let tight = Tight::new(40 * MIB);
    require!(tight.as_ref());
    let tight = tight.expect("it is there");
    let host = Host::new();
    host.set("EBB_SWAP_DIR", tight.swap());
    host.set("EBB_SWAP_KEEP_FREE", "0");
    host.set("EBB_WHEN_SWAP_IS_FULL", "give-way");
    let vm = host.run(Guest::debian("6.1-cloud").memory("1G"));
    vm.guest("fill a 400M");
    vm.ebb("limit 200M").ok();
    let stuck = || vm.status().limit.stuck.filter(|why| why.contains("no space left"));
    let stuck = until("the disk to be full", stuck);
    assert!(stuck.contains("make room on"), "{stuck}");
    assert!(stuck.contains(&tight.swap().display().to_string()), "{stuck}");
    assert!(room(&tight.path("mount")) < 2 * MIB);
    let shown = vm.ebb("status").ok();
    assert_eq!(shown.matches("blocked by").count(), 1, "{shown}");
    // Nothing is lost, and nothing waits for room that is not made.
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("fill b 100M");
    assert!(vm.host_bytes() > 200 * MIB);
    until("the log to say so", || host.log().contains("no space left").then_some(()));
    fs::remove_file(tight.ballast()).expect("room is made");
    until("the store to be well again", || vm.status().limit.stuck.is_none().then_some(()));
    until("the limit to hold", || (vm.host_bytes() <= 200 * MIB).then_some(()));
    assert_eq!(vm.guest("check a"), "0");
    assert_eq!(vm.guest("check b"), "0");
    until("nothing to be in the way", || vm.status().limit.stuck.is_none().then_some(()));
}
