//! What fails beneath a VM: one test for each line of `docs/faults.md` that no other test covers.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use vmtest::{
    Disk, Failing, FaultyDisk, Guest, Host, Vm, require, rounds, until, until_fits, until_or,
};

const MIB: u64 = 1 << 20;

/// A VM of 512 MiB under a limit of 160 MiB. Its swap file is on a disk that fails on request, and
/// it has memory with a known content beyond the limit.
fn limited(disk: &FaultyDisk) -> (Host, Vm) {
    let host = Host::new();
    host.set("EBB_SWAP_DIR", disk.path());
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M"));
    vm.guest("fill hard 200M");
    vm.ebb("limit 160M").ok();
    wait_limit(&vm);
    (host, vm)
}

fn wait_limit(vm: &Vm) {
    until("the limit to hold", || (vm.host_bytes() <= 160 * MIB).then_some(()));
}

/// Waits until the limit is stuck for an error of the swap file. Other reasons may come first.
fn wait_stuck(vm: &Vm) {
    let is_told = |stuck: &Option<String>| {
        stuck.as_ref().is_some_and(|why| why.contains(".swap: Input/output error"))
    };
    until_fits("an error of the swap file", || vm.status().limit.stuck, is_told);
}

/// Has the guest check its memory while something fails, until `mend` ends that. Returns whether
/// the guest had to wait for it.
fn check_while(vm: &Vm, fails: impl FnOnce(), mend: impl FnOnce()) -> bool {
    thread::scope(|scope| {
        let checking = scope.spawn(|| vm.guest("check hard"));
        fails();
        let waited = !checking.is_finished();
        mend();
        assert_eq!(checking.join().expect("the guest answers"), "0");
        waited
    })
}

#[test]
fn a_swap_disk_that_does_not_write_costs_the_guest_nothing() {
    let disk = FaultyDisk::new();
    require!(disk.as_ref());
    let disk = disk.expect("it is there");
    let (_host, vm) = limited(&disk);
    disk.set(Failing::Writes);
    vm.guest("fill more 100M");
    wait_stuck(&vm);
    assert_eq!(vm.guest("check more"), "0");
    assert_eq!(vm.guest("check hard"), "0");
    disk.set(Failing::Nothing);
    wait_limit(&vm);
    until("the store to be well again", || vm.status().limit.stuck.is_none().then_some(()));
    assert_eq!(vm.guest("check more"), "0");
    assert_eq!(vm.guest("check hard"), "0");
}

#[test]
fn a_guest_waits_for_a_swap_disk_that_does_not_read() {
    let disk = FaultyDisk::new();
    require!(disk.as_ref());
    let disk = disk.expect("it is there");
    let (_host, vm) = limited(&disk);
    disk.set(Failing::Reads);
    let waited = check_while(&vm, || wait_stuck(&vm), || disk.set(Failing::Nothing));
    assert!(waited, "what could not be read was handed out");
    until("the store to be well again", || vm.status().limit.stuck.is_none().then_some(()));
}

#[test]
fn a_slow_swap_disk_is_slow_and_no_more() {
    let disk = FaultyDisk::new();
    require!(disk.as_ref());
    let disk = disk.expect("it is there");
    let (host, vm) = limited(&disk);
    disk.set(Failing::Slow(Duration::from_millis(20)));
    // The daemon answers while this VM's worker waits for the disk.
    let other = host.run(Guest::debian("6.1-cloud").memory("256M"));
    other.guest("fill a 50M");
    vm.guest("fill more 20M");
    assert_eq!(vm.guest("check more"), "0");
    assert_eq!(other.guest("check a"), "0");
    disk.set(Failing::Nothing);
    assert_eq!(vm.guest("check hard"), "0");
}

/// A guest writes memory to its own disk that has to be read from the swap file.
#[test]
fn a_guests_own_disk_waits_for_a_swap_disk_that_does_not_read() {
    let swap = FaultyDisk::new();
    require!(swap.as_ref());
    let swap = swap.expect("it is there");
    let host = Host::new();
    host.set("EBB_SWAP_DIR", swap.path());
    let disk = Disk::new(&host, "disk", "256M").formatted("ext4");
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").own_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    for (name, value) in [("background_ratio", 90), ("ratio", 95), ("writeback_centisecs", 0)] {
        vm.guest(&format!("write /proc/sys/vm/dirty_{name} {value}"));
    }
    vm.guest("sh dd if=/dev/urandom of=/mnt/file bs=1M count=60");
    let sum = vm.guest("sh md5sum /mnt/file");
    vm.ebb("evict --bytes 400M").ok();
    swap.set(Failing::Slow(Duration::from_millis(10)));
    let before = vm.status().disks.requests;
    thread::scope(|scope| {
        let syncing = scope.spawn(|| vm.guest("fsync /mnt/file"));
        until("the disk to be written", || (vm.status().disks.requests > before + 4).then_some(()));
        swap.set(Failing::Reads);
        wait_stuck(&vm);
        assert!(!syncing.is_finished());
        swap.set(Failing::Nothing);
        syncing.join().expect("the guest answers");
    });
    assert_eq!(vm.status().disks.failed_requests, 0);
    vm.guest("write /proc/sys/vm/drop_caches 3");
    assert_eq!(vm.guest("sh md5sum /mnt/file"), sum);
}

/// A part of the guest's page cache is disk-backed by a disk that does not read any more.
#[test]
fn a_guest_waits_for_a_disk_of_its_own_that_does_not_read() {
    let faulty = FaultyDisk::new();
    require!(faulty.as_ref());
    let faulty = faulty.expect("it is there");
    let host = Host::new();
    let content = host.directory().join("content");
    let byte = |n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8;
    fs::write(&content, (0..60 << 20).map(byte).collect::<Vec<u8>>()).expect("a file");
    let disk = Disk::new(&host, "disk", "128M").formatted("ext4");
    let disk = disk.with_files(&[(&content, "file")]);
    let image = faulty.path().join("image");
    fs::copy(disk.image(), &image).expect("a copy");
    let readonly = format!("{},readonly", image.display());
    let guest = Guest::debian("6.1-cloud").memory("512M").own_device(Path::new(&readonly));
    let vm = host.run(guest);
    vm.guest("mount ext4 /dev/vda /mnt");
    let sum = vm.guest("sh md5sum /mnt/file");
    vm.ebb("evict --bytes 400M").ok();
    let on_disk = vm.status().limit.on_disk_bytes;
    assert!(on_disk > 30 * MIB, "{on_disk}");
    faulty.set(Failing::Reads);
    thread::scope(|scope| {
        let reading = scope.spawn(|| vm.guest("sh md5sum /mnt/file"));
        let names = format!("{}: sector ", image.display());
        until("a warning that names the sector", || {
            let is_it = |warning: &String| {
                warning.contains("cannot be brought back") && warning.contains(&names)
            };
            vm.status().warnings.iter().any(is_it).then_some(())
        });
        until("the warning among the events", || {
            host.ebb("events --type warning").ok().contains(&names).then_some(())
        });
        assert!(!reading.is_finished(), "what could not be read was handed out");
        faulty.set(Failing::Nothing);
        assert_eq!(reading.join().expect("the guest answers"), sum);
    });
    until("nothing to be in the way", || vm.status().limit.stuck.is_none().then_some(()));
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).expect("a number"), signal).expect("it runs");
}

#[test]
fn a_guest_waits_for_a_process_that_is_stopped() {
    let disk = FaultyDisk::new();
    require!(disk.as_ref());
    let disk = disk.expect("it is there");
    let (host, vm) = limited(&disk);
    let server = host.servers()[0];
    let stop = Duration::from_secs(u64::from(rounds(3, 30)));
    signal(server, Signal::STOP);
    let waited = check_while(&vm, || thread::sleep(stop), || signal(server, Signal::CONT));
    assert!(waited, "the guest cannot have had its memory without the VM's process");
    wait_limit(&vm);
    until("nothing to be in the way", || vm.status().limit.stuck.is_none().then_some(()));
}

/// A group of processes with this controller, removed at the end.
struct Group(std::path::PathBuf);

impl Group {
    fn new(controller: &str) -> Result<Group, String> {
        let path = format!("/sys/fs/cgroup/{controller}/ebb-faults-{}", std::process::id());
        fs::create_dir(&path).map_err(|error| format!("{path}: {error}"))?;
        Ok(Group(path.into()))
    }

    fn write(&self, name: &str, value: &str) -> Result<(), String> {
        let path = self.0.join(name);
        fs::write(&path, value).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn add(&self, pid: i32) {
        self.write("cgroup.procs", &pid.to_string()).expect("the process joins the group");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let removed = until_or(|| fs::remove_dir(&self.0).is_ok().then_some(()));
        if removed.is_none() {
            eprintln!("{}: not removed", self.0.display());
        }
    }
}

#[test]
fn a_process_that_gets_no_more_threads_loses_nothing() {
    let group = Group::new("pids");
    require!(group.as_ref());
    let group = group.expect("it is there");
    let disk = FaultyDisk::new();
    require!(disk.as_ref());
    let disk = disk.expect("it is there");
    let host = Host::new();
    host.set("EBB_SWAP_DIR", disk.path());
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M"));
    vm.guest("fill hard 200M");
    let server = host.servers()[0];
    group.add(server);
    let threads = fs::read_dir(format!("/proc/{server}/task")).expect("its threads").count();
    group.write("pids.max", &threads.to_string()).expect("a limit");
    // The limit may be refused, or hold without the threads that it should have.
    vm.ebb("limit 160M");
    assert_eq!(vm.guest("check hard"), "0");
    group.write("pids.max", "max").expect("no limit");
    vm.ebb("limit 160M").ok();
    wait_limit(&vm);
    assert_eq!(vm.guest("check hard"), "0");
    signal(server, Signal::KILL);
    host.start();
    assert_eq!(vm.guest("check hard"), "0");
}

#[test]
fn a_guests_own_disk_that_fails_is_an_error_to_the_guest_alone() {
    let disk = FaultyDisk::new();
    require!(disk.as_ref());
    let disk = disk.expect("it is there");
    let image = disk.path().join("image");
    fs::File::create(&image).and_then(|file| file.set_len(64 * MIB)).expect("an image");
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").own_device(&image));
    vm.forgive();
    vm.guest("fill a 50M");
    disk.set(Failing::Reads);
    assert!(vm.try_guest("sh dd if=/dev/vda of=/dev/null bs=4k count=1 iflag=direct").is_err());
    disk.set(Failing::Nothing);
    vm.guest("sh dd if=/dev/vda of=/dev/null bs=4k count=1 iflag=direct");
    assert_eq!(vm.guest("check a"), "0");
    assert!(vm.status().disks.failed_requests > 0);
}
