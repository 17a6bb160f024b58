//! Hosts that have what this one lacks: a guest in which the test runs again, with VMs of its own.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ebb_sys::page_idle::PageIdle;

use crate::assets::{self, Kernel};
use crate::host::call;
use crate::wait::NESTED;
use crate::{Disk, Guest, Host, Ran, Vm, rounds, skip};

/// Kernel of a host with two nodes: `PAGEMAP_SCAN` exists since 6.7.
const TWO_NODES: &str = "6.12";
/// Kernel of a host with idle page tracking: no kernel of Debian's has it.
const IDLE_TRACKING: &str = "host";
const MAKE_IT: &str = "cargo xtask guest-kernel --host";
/// Kernel of a host with an IOMMU, and its option for it.
const IOMMU: &str = "6.12";
const USE_IOMMU: &str = "intel_iommu=on";
/// Where such a host has an NVMe disk, alone in its group.
pub const NVME_ADDRESS: &str = "0000:00:05.0";
const NVME_BYTES: u64 = 256 << 20;
/// Where such a host has a network card, alone in its group.
pub const CARD_ADDRESS: &str = "0000:00:07.0";
/// The host's address on the network that it shares with that card.
pub const HOST_IP: &str = "10.9.0.1";
/// The address there of whoever has the card.
pub const CARD_IP: &str = "10.9.0.2";
/// The host's own card, and the one behind the IOMMU, joined by a hub of QEMU's. The host numbers
/// its cards in the order of their slots.
const CARDS: &str = "-netdev hubport,id=own,hubid=1 -netdev hubport,id=given,hubid=1 \
     -device virtio-net-pci,netdev=own,addr=6,romfile= \
     -device virtio-net-pci,netdev=given,addr=7,romfile=,disable-legacy=on,iommu_platform=on";
/// Kernel of the VMs in the guest.
pub const INNER_KERNEL: &str = "6.1-cloud";
/// A kernel of such VMs that shares its allocator; it need not be there.
pub const SHARING_KERNEL: &str = "llfree";
/// Longest time for the test. An emulator under an emulator takes twenty times as long.
const DEADLINE: Duration = Duration::from_secs(1800);
const LOOK_EVERY: Duration = Duration::from_secs(5);
const MEMORY: &str = "2G";
const SLOW_MEMORY: &str = "1G";
const IMAGE_BYTES: u64 = 2 << 30;
/// Directory of the test's programs in the guest, as cargo has them.
const PROGRAMS: &str = "ebb/release";
const TEST: &str = "ebb/release/deps/test";
const QEMU: &str = "qemu-system-x86_64";
/// Files that QEMU loads besides its libraries, as far as the distribution has them there.
const QEMU_FILES: [&str; 3] =
    ["/usr/share/qemu", "/usr/share/seabios", "/usr/lib/x86_64-linux-gnu/qemu"];

/// Runs the test of this name in a guest with two nodes, or records that it is skipped. `false`:
/// this host has two nodes, and the caller goes on.
///
/// # Panics
/// The test fails there, or cannot run.
pub fn on_two_nodes(test: &str) -> bool {
    if ebb_tier::host::nodes().is_ok_and(|nodes| nodes.len() > 1) {
        return false;
    }
    if rounds(0, 1) == 0 {
        skip::record(
            test,
            "one NUMA node, and minutes in a guest with two: cargo xtask soak nodes",
        );
        return true;
    }
    is_run_in(TWO_NODES, test, |guest, _| guest.slow_node(SLOW_MEMORY), |_| ())
}

/// Runs the test of this name in a guest with an IOMMU and an NVMe disk, [`NVME_ADDRESS`], which the
/// test can pass on to a VM. `false`: this is such a guest, and the caller goes on.
///
/// # Panics
/// Those of [`on_two_nodes`].
pub fn with_iommu(test: &str) -> bool {
    is_run_with_iommu(test, |guest| guest, |_| ())
}

/// Does the same in a guest that has two network cards besides: its own, with [`HOST_IP`], and
/// [`CARD_ADDRESS`], which the test can pass on.
///
/// # Panics
/// Those of [`on_two_nodes`].
pub fn with_iommu_and_network(test: &str) -> bool {
    let begin = |vm: &Vm| {
        vm.guest(&format!("network {HOST_IP}/24 {CARD_IP}"));
    };
    is_run_with_iommu(test, |guest| guest.qemu_args(CARDS), begin)
}

fn is_run_with_iommu(test: &str, with_cards: impl Fn(Guest) -> Guest, begin: impl Fn(&Vm)) -> bool {
    if std::env::var_os(NESTED).is_some() {
        return false;
    }
    if rounds(0, 1) == 0 {
        skip::record(
            test,
            "no IOMMU, and minutes in a guest with one: cargo xtask soak passthrough",
        );
        return true;
    }
    let machine = |guest: Guest, directory: &Path| {
        let image = directory.join("nvme.img");
        File::create(&image).and_then(|file| file.set_len(NVME_BYTES)).expect("an image");
        with_cards(guest.append(USE_IOMMU).qemu_args(&format!(
            "-device intel-iommu,intremap=on,caching-mode=on -cpu max \
             -drive file={},if=none,id=nvme,format=raw,cache=unsafe \
             -device nvme,serial=ebb,drive=nvme,addr=5",
            image.display()
        )))
    };
    is_run_in(IOMMU, test, machine, begin)
}

/// Does the same in a guest whose kernel has idle page tracking.
///
/// # Panics
/// Those of [`on_two_nodes`].
pub fn with_idle_tracking(test: &str) -> bool {
    if PageIdle::open().is_ok() {
        return false;
    }
    if assets::kernel(IDLE_TRACKING).is_err() {
        skip::record(test, &format!("no kernel with idle page tracking: {MAKE_IT} builds one"));
        return true;
    }
    is_run_in(IDLE_TRACKING, test, |guest, _| guest, |_| ())
}

/// Runs the test in a guest, after `begin`. Returns `true`, also if the test is skipped.
fn is_run_in(
    kernel: &str,
    test: &str,
    machine: impl Fn(Guest, &Path) -> Guest,
    begin: impl Fn(&Vm),
) -> bool {
    if let Err(reason) = assets::kernel(kernel) {
        skip::record(test, &reason);
        return true;
    }
    let host = Host::new();
    let image = image(host.directory());
    let drive = format!("file={},if=virtio,format=raw,cache=unsafe", image.display());
    let guest = Guest::debian(kernel).memory(MEMORY).qemu_args(&format!("-drive {drive}"));
    let vm = host.qemu(machine(guest, host.directory()));
    prepare(&vm);
    begin(&vm);
    let variables = format!("PATH=/usr/bin:/bin EBB_BIN_DIR=/{PROGRAMS} HOME=/root {NESTED}=1");
    let run = format!("env {variables} chroot /mnt /{TEST} --exact --nocapture {test}");
    vm.guest(&format!("sh ({run}; echo status $?) >/tmp/out 2>&1 </dev/null &"));
    let output = wait(&vm);
    println!("{output}");
    assert!(output.ends_with("status 0"), "{test} in a guest with {kernel}");
    // Without this, a test that does not exist or was skipped would count as a success.
    let ran = output.contains("1 passed") && !output.contains("SKIPPED");
    assert!(ran, "{test} ran in a guest with {kernel}");
    true
}

fn prepare(vm: &Vm) {
    vm.guest("load vfio_pci");
    vm.guest("mount ext4 /dev/vda /mnt");
    for at in ["proc", "sys", "dev"] {
        vm.guest(&format!("sh mount --bind /{at} /mnt/{at}"));
    }
    for at in ["tmp", "run", "dev/shm"] {
        vm.guest(&format!("sh mkdir -p /mnt/{at}; mount -t tmpfs none /mnt/{at}"));
    }
}

/// Waits for the test. Returns its output up to its status.
fn wait(vm: &Vm) -> String {
    let end = Instant::now() + DEADLINE;
    loop {
        std::thread::sleep(LOOK_EVERY);
        let output = vm.guest("sh cat /tmp/out");
        let last = output.lines().last().unwrap_or_default();
        if last.starts_with("status ") {
            return output;
        }
        assert!(Instant::now() < end, "no end after {DEADLINE:?}: {output}");
    }
}

/// A disk with this test, Ebb, QEMU, and a kernel for its guests.
fn image(directory: &Path) -> PathBuf {
    let (root, image) = (directory.join("root"), directory.join("root.img"));
    for at in ["proc", "sys", "dev", "tmp", "run", "root"] {
        fs::create_dir_all(root.join(at)).expect("a directory");
    }
    let own = std::env::current_exe().expect("this program");
    let programs = assets::program_directory();
    copy(&own, &root.join(TEST));
    for program in ["ebb", "ebbd"] {
        copy(&programs.join(program), &root.join(PROGRAMS).join(program));
    }
    add_qemu(&root);
    for program in [own, programs.join("ebb"), programs.join("ebbd")] {
        add_libraries(&program, &root);
    }
    add_kernels(&root);
    File::create(&image).and_then(|file| file.set_len(IMAGE_BYTES)).expect("an image");
    call(&[&"mkfs.ext4", &"-q", &"-d", &root, &image]);
    fs::remove_dir_all(&root).expect("no more of it");
    image
}

/// Copies this host's QEMU, and what it needs, into the file system of a disk.
pub fn with_qemu(disk: Disk) -> Disk {
    disk.mounted(add_qemu)
}

/// Copies these programs of this host, and the libraries that they are linked with, into the file
/// system of a disk.
///
/// # Panics
/// One of them is not in PATH.
pub fn with_programs(disk: Disk, names: &[&str]) -> Disk {
    disk.mounted(|root| names.iter().for_each(|name| add_program(name, root)))
}

fn add_program(name: &str, root: &Path) {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = std::env::split_paths(&path).map(|at| at.join(name)).find(|at| at.is_file());
    let program = program.unwrap_or_else(|| panic!("no {name}: run scripts/setup test"));
    copy(&program, &root.join("usr/bin").join(name));
    add_libraries(&program, root);
}

fn add_qemu(root: &Path) {
    add_program(QEMU, root);
    for directory in QEMU_FILES.map(Path::new).into_iter().filter(|path| path.is_dir()) {
        let to = inside(root, directory);
        fs::create_dir_all(&to).expect("a directory");
        call(&[&"cp", &"--recursive", &"--dereference", &directory.join("."), &to]);
    }
    let accelerators = Path::new(QEMU_FILES[2]).join("accel-tcg-x86_64.so");
    if accelerators.is_file() {
        add_libraries(&accelerators, root);
    }
}

fn add_kernels(root: &Path) {
    let inner = assets::kernel(INNER_KERNEL).unwrap_or_else(|why| panic!("{why}"));
    let kernels: BTreeMap<&str, Result<Kernel, String>> =
        [(INNER_KERNEL, Ok(inner)), (SHARING_KERNEL, assets::kernel(SHARING_KERNEL))].into();
    for kernel in kernels.values().flatten() {
        for file in [&kernel.vmlinuz, &kernel.initrd] {
            copy(file, &inside(root, file));
        }
    }
    let manifest = serde_json::to_vec(&kernels).expect("JSON");
    fs::write(root.join("ebb/assets.json"), manifest).expect("a manifest");
}

/// Adds the libraries that the program is linked with.
fn add_libraries(program: &Path, root: &Path) {
    let list = Ran::of(Command::new("ldd").arg(program)).ok();
    for word in list.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = inside(root, Path::new(word));
        if !to.exists() {
            copy(Path::new(word), &to);
        }
    }
}

/// The same path below another root.
fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
    fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
}
