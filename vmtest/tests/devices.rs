//! Devices that reach a VM's memory by themselves, and migrations that hand it over: what may be
//! taken beside them, and what happens when one comes while memory is evicted.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ebb_api::{MayTake, VmStatus};
use serde_json::json;
use vmtest::{Disk, Guest, Host, Ran, Vm, assets, permit, require, until, until_fits};

const MIB: u64 = 1 << 20;
const VIRTIOFSD: [&str; 2] = ["/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd"];

/// A directory of the host, served by virtiofsd for one connection.
struct Share {
    directory: PathBuf,
    socket: PathBuf,
    server: Child,
}

impl Share {
    fn start(host: &Host, program: &Path) -> Share {
        let directory = host.directory().join("share");
        fs::create_dir_all(&directory).expect("a directory");
        let socket = host.directory().join("share.sock");
        let log = File::create(host.directory().join("virtiofsd.log")).expect("a log");
        let server = Command::new(program)
            .arg(format!("--socket-path={}", socket.display()))
            .args(["-o", &format!("source={}", directory.display()), "-o", "sandbox=chroot"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("virtiofsd starts");
        until("virtiofsd's socket", || socket.exists().then_some(()));
        permit(&socket, 0o666);
        Share { directory, socket, server }
    }

    fn sum(&self, name: &str) -> String {
        let sum = Ran::of(Command::new("md5sum").arg(self.directory.join(name))).ok();
        sum.split(' ').next().expect("a sum").into()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // The server ends by itself when QEMU disconnects.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn virtiofsd() -> Result<PathBuf, String> {
    let found = VIRTIOFSD.iter().map(Path::new).find(|path| path.is_file());
    found.map(Path::to_owned).ok_or_else(|| "no virtiofsd: install qemu-system-common".into())
}

fn limit_to(vm: &Vm, mib: u64) {
    vm.ebb(&format!("limit {mib}M")).ok();
    wait_until_limited(vm, mib);
}

fn wait_until_limited(vm: &Vm, mib: u64) {
    until("the limit to hold", || (vm.host_bytes() <= mib * MIB).then_some(()));
}

/// Waits until this may be taken. Returns the VM's status then.
fn wait_reach(vm: &Vm, what: MayTake) -> VmStatus {
    until(format_args!("{what} to be what may be taken"), || {
        Some(vm.status()).filter(|status| status.reach.may_take == what)
    })
}

fn plug(vm: &Vm, share: &Share) {
    let address = json!({ "type": "unix", "data": { "path": share.socket } });
    let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
    vm.qmp("chardev-add", json!({ "id": "files", "backend": backend }));
    let device = json!({ "driver": "vhost-user-fs-pci", "id": "files0", "chardev": "files",
                         "tag": "shared", "bus": "port0" });
    vm.qmp("device_add", device);
}

fn unplug(vm: &Vm) {
    vm.qmp("device_del", json!({ "id": "files0" }));
    until("the device to go", || {
        let list = vm.qmp("qom-list", json!({ "path": "/machine/peripheral" }));
        let all = list.as_array().expect("a list").iter();
        (!all.clone().any(|object| object["name"] == "files0")).then_some(())
    });
}

fn guest_sum(vm: &Vm, path: &str) -> String {
    let answer = vm.guest(&format!("sh busybox md5sum {path}"));
    answer.split(' ').next().expect("a sum").into()
}

/// Found by a review: the limit went on, and pages of zeros were written to the host's files.
#[test]
fn a_shared_directory_plugged_under_a_limit_suspends_it() {
    let program = virtiofsd();
    require!(program.as_ref().map_err(Clone::clone).map(drop));
    let host = Host::new();
    let port = "-device pcie-root-port,id=port0,chassis=1,slot=1";
    let vm = host.run(Guest::debian("6.1-cloud").memory("448M").backing("small").qemu_args(port));
    vm.wait_trusted();
    limit_to(&vm, 110);
    vm.guest("fill a 100M");
    vm.guest("sh busybox head -c 50331648 /dev/urandom > /tmp/source");
    let source = guest_sum(&vm, "/tmp/source");
    assert!(vm.status().limit.saved_bytes > 32 * MIB);

    let share = Share::start(&host, &program.expect("it is there"));
    fs::write(share.directory.join("theirs"), random(16 << 20)).expect("a file");
    plug(&vm, &share);
    until("the shared directory", || vm.try_guest("mount virtiofs shared /mnt").ok());
    for name in ["first", "second"] {
        vm.guest(&format!("sh busybox cp /tmp/source /mnt/{name}; busybox sync"));
        assert_eq!(share.sum(name), source, "{name} on the host");
    }
    assert_eq!(guest_sum(&vm, "/mnt/theirs"), share.sum("theirs"));
    let status = wait_reach(&vm, MayTake::FreeOnly);
    assert_eq!(status.reach.devices[0].name, "vhost-user-fs-pci files0");
    assert!(status.mode_reason.contains("vhost-user-fs-pci files0"), "{}", status.mode_reason);
    let stuck = status.limit.stuck.expect("the limit does not hold");
    assert!(stuck.contains("vhost-user-fs-pci files0"), "{stuck}");
    assert_eq!(status.limit.saved_bytes, 0);
    assert!(vm.ebb("evict --bytes 64M").refused().contains("files0"));
    vm.reclaim();
    assert_eq!(vm.guest("check a"), "0");

    vm.guest("umount /mnt");
    unplug(&vm);
    wait_reach(&vm, MayTake::Everything);
    wait_until_limited(&vm, 110);
    assert_eq!(vm.guest("check a"), "0");
    assert_eq!(guest_sum(&vm, "/tmp/source"), source);
    assert_shared_migration_is_in_the_way(&vm);
}

fn random(bytes: u64) -> Vec<u8> {
    let mut all = Vec::new();
    File::open("/dev/urandom").expect("random").take(bytes).read_to_end(&mut all).expect("random");
    all
}

fn set_ignore_shared(vm: &Vm, on: bool) {
    vm.set_migration_capability("x-ignore-shared", on);
}

/// Checks that nothing is evicted while the next migration hands over the memory itself.
fn assert_shared_migration_is_in_the_way(vm: &Vm) {
    assert!(vm.status().limit.saved_bytes > 0);
    set_ignore_shared(vm, true);
    let status = wait_reach(vm, MayTake::Nothing);
    assert_eq!((status.limit.saved_bytes, status.limit.on_disk_bytes), (0, 0));
    assert!(status.limit.stuck.expect("in the way").contains("x-ignore-shared"));
    assert!(vm.ebb("reclaim").refused().contains("x-ignore-shared"));
    set_ignore_shared(vm, false);
    wait_reach(vm, MayTake::Everything);
    wait_until_limited(vm, 110);
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn a_disk_of_another_process_leaves_free_memory_only() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "other", "64M");
    disk.start();
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").served_disk(&disk));
    let status = vm.wait_trusted();
    assert_eq!(status.reach.may_take, MayTake::FreeOnly);
    assert_eq!(status.reach.devices[0].name, "vhost-user-blk-pci");
    host.ebb("pool 1G").ok();
    for line in ["limit 200M", "evict --bytes 64M", "share 256M"] {
        let why = vm.ebb(line).refused();
        assert!(why.contains("vhost-user-blk-pci"), "{line}: {why}");
    }
    vm.guest("fill a 200M");
    vm.guest("free a");
    assert!(vm.reclaim().bytes > 100 * MIB);
    vm.guest("disk /dev/vda 32M");
}

#[test]
fn a_migration_that_hands_the_memory_over_finds_all_of_it() {
    let host = Host::new();
    let from = host.run(Guest::debian("6.1-cloud").memory("384M").backing("small"));
    from.wait_trusted();
    limit_to(&from, 128);
    from.guest("fill a 200M");
    // At first nobody knows what the migration does.
    assert!(from.status().limit.saved_bytes > 64 * MIB);
    let speed = |bytes: u64| from.set_migration(json!({ "max-bandwidth": bytes }));
    speed(4096);
    set_ignore_shared(&from, true);
    from.begin_migration(&host.nowhere());
    wait_reach(&from, MayTake::Nothing);
    let state = until("the end of the migration", || {
        let state = from.qmp("query-migrate", json!({}))["status"].as_str().map(str::to_owned);
        state.filter(|state| !["active", "setup", "cancelling"].contains(&state.as_str()))
    });
    assert_eq!(state, "cancelled");
    assert_eq!(from.status().limit.saved_bytes, 0);
    assert_eq!(from.guest("check a"), "0", "after a migration that was cancelled");
    speed(1 << 30);
    let socket = host.directory().join("heir.sock");
    let heir = host.arriving(&from, &socket, true);
    set_ignore_shared(&heir, true);
    from.migrate_to(&heir, &socket);
    assert_eq!(heir.guest("check a"), "0", "in the same memory");
    from.kill();
    until("the source to be forgotten", || host.list().is_empty().then_some(()));
    assert_eq!(heir.guest("check a"), "0", "in the same memory, alone");
}

/// It is refused for its QEMU type alone: such an object can also be made where the processor has
/// no SEV.
#[test]
fn a_vm_whose_memory_must_stay_is_refused() {
    let host = Host::new();
    let object = "-object sev-guest,id=sev0,cbitpos=47,reduced-phys-bits=1";
    let why = host.ebb(&format!("run --name a --memory 256M -- {object}")).refused();
    assert!(why.contains("sev-guest sev0"), "{why}");
    assert!(host.list().is_empty());
    let is_qemu = |program: &String| program.contains("qemu");
    until_fits("no QEMU", || host.processes(), |all| !all.iter().any(is_qemu));
    assert!(!host.run_directory().join("vms/a").exists());
}

/// It is refused for its object alone. QEMU opens `/dev/iommu` for that, which needs a kernel with
/// `CONFIG_IOMMUFD`.
#[test]
fn a_vm_with_iommufd_is_refused_with_what_to_do() {
    let qemu = assets::qemu11();
    require!(qemu.as_ref().map_err(Clone::clone).map(drop));
    require!(fs::metadata("/dev/iommu").map_err(|error| format!("/dev/iommu: {error}")));
    let host = Host::new();
    let programs = assets::for_all_users(&qemu.expect("it is there"));
    host.set("EBB_QEMU", programs.join("qemu-system-x86_64"));
    let object = "-object iommufd,id=iommufd0";
    let why = host.ebb(&format!("run --name a --memory 256M -- {object}")).refused();
    for part in ["iommufd iommufd0", "leave out -object iommufd"] {
        assert!(why.contains(part), "{why}");
    }
    assert!(host.list().is_empty());
    assert!(!host.run_directory().join("vms/a").exists());
}
