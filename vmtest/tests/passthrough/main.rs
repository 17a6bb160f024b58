//! VMs with a device that is passed through (VFIO). A guest with an IOMMU is their host, with the
//! daemon, QEMU and the VM inside. That takes minutes: `cargo xtask soak passthrough`.

mod network;
mod plugged;
mod user;

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ebb_api::{MayTake, Mechanism, Mode};
use rustix::fs::OFlags;
use vmtest::nested::{INNER_KERNEL, NVME_ADDRESS, SHARING_KERNEL, with_iommu};
use vmtest::{Guest, Host, Vm, assets, require, until};

const MIB: u64 = 1 << 20;
const DISK: &str = "/dev/nvme0n1";
/// Part of the disk that a round uses.
const USED: &str = "20M";
/// More than the reserve and what is free in small blocks: what the guest uses next was reclaimed.
const RESERVE: &str = "100M";
/// Rounds of a test, each with as much free memory.
const ROUNDS: u32 = 2;
const FREED: &str = "250M";
const RECLAIMED: u64 = 150 * MIB;

/// Gives the device to whoever passes it on.
fn pass_on(address: &str) {
    let device = Path::new("/sys/bus/pci/devices").join(address);
    let put = |path: PathBuf, word: &str| {
        fs::write(&path, word).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    };
    put(device.join("driver_override"), "vfio-pci");
    if device.join("driver").exists() {
        put(device.join("driver/unbind"), address);
    }
    put("/sys/bus/pci/drivers_probe".into(), address);
}

/// Most of its memory is above 4 GiB.
fn guest(kernel: &str, devices: &str) -> Guest {
    let low = "-machine max-ram-below-4g=128M";
    Guest::debian(kernel).memory("640M").cpus(1).qemu_args(&format!("{low} {devices}"))
}

/// QEMU's arguments for the device, called `id`, behind a port of its own, `ID-port`.
fn behind_port(number: u8, address: &str, id: &str) -> String {
    format!(
        "-device pcie-root-port,id={id}-port,chassis={number},slot={number} \
         -device vfio-pci,host={address},bus={id}-port,id={id}"
    )
}

/// Waits until Ebb trusts the guest, and checks what it may take beside the devices.
fn wait_held(vm: &Vm) {
    vm.wait_trusted();
    let status = vm.status();
    assert_eq!((status.mode, status.reach.may_take), (Mode::Strict, MayTake::FreeOnly));
}

fn run(host: &Host, kernel: &str) -> Vm {
    pass_on(NVME_ADDRESS);
    let vm = host.run(guest(kernel, &behind_port(1, NVME_ADDRESS, "disk")).privileged());
    wait_held(&vm);
    wait_disk(&vm);
    vm
}

fn wait_disk(vm: &Vm) {
    vm.guest("load nvme");
    until("the disk", || vm.try_guest(&format!("sh ls {DISK}")).ok());
}

/// Reclaims all free memory but the reserve. QEMU may be too slow to answer in time: it is asked
/// again.
fn reclaim(vm: &Vm) {
    let mut bytes = 0;
    until("free memory to be reclaimed", || {
        let report = vm.reclaim();
        bytes += report.bytes;
        println!("{} MiB reclaimed: {}", bytes / MIB, report.stopped_by);
        (bytes > RECLAIMED && !report.stopped_by.contains("in time")).then_some(())
    });
}

/// Memory is freed, reclaimed, and used again by a device before any processor touches it.
/// `request`: what has the guest use the device.
fn free_and_have(vm: &Vm, request: &str) -> Result<String, String> {
    vm.guest(&format!("fill a {FREED}"));
    vm.guest("free a");
    vm.guest("dropcaches");
    reclaim(vm);
    vm.guest(&format!("fill reserve {RESERVE}"));
    let used = vm.try_guest(request).map_err(|error| format!("{error:?}"));
    vm.try_guest("free reserve").ok();
    used
}

/// Does so with the disk.
fn free_and_use(vm: &Vm) -> Result<String, String> {
    free_and_have(vm, &format!("disk {DISK} {USED}"))
}

/// What this kernel has said of accesses that its IOMMU refused.
fn dma_faults() -> Vec<String> {
    let flags = OFlags::NONBLOCK.bits() as i32;
    let mut log = File::options().read(true).custom_flags(flags).open("/dev/kmsg").expect("a log");
    let (mut faults, mut record) = (Vec::new(), [0; 8192]);
    loop {
        match log.read(&mut record) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&record[..bytes]).into_owned();
                if text.contains("DMAR:") && text.contains("fault") {
                    faults.push(text);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return faults,
            // The record was overwritten meanwhile.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) => panic!("the kernel's log: {error}"),
        }
    }
}

#[test]
fn memory_goes_and_comes_under_a_disk_that_is_passed_through() {
    if with_iommu("memory_goes_and_comes_under_a_disk_that_is_passed_through") {
        return;
    }
    let host = Host::new();
    let vm = run(&host, INNER_KERNEL);
    for round in 0..ROUNDS {
        assert_eq!(free_and_use(&vm), Ok("0".into()), "round {round}");
        if round == 0 {
            host.kill9();
            host.start();
        }
    }
    // A guest that boots again finds all of its memory mapped.
    vm.guest(&format!("fill a {FREED}"));
    vm.guest("free a");
    reclaim(&vm);
    vm.reboot();
    vm.wait_trusted();
    wait_disk(&vm);
    assert_eq!(free_and_use(&vm), Ok("0".into()));
    assert_eq!(dma_faults(), [""; 0]);
    for command in ["limit 300M", "evict --bytes 100M"] {
        let why = vm.ebb(command).refused();
        assert!(why.contains("memory in use is not evicted"), "{why}");
    }
}

/// The guest's allocator is shared: memory is mapped before the guest has it (HyperAlloc).
#[test]
fn memory_that_a_shared_allocator_installs_is_mapped_first() {
    if with_iommu("memory_that_a_shared_allocator_installs_is_mapped_first") {
        return;
    }
    require!(assets::kernel(SHARING_KERNEL));
    let host = Host::new();
    let vm = run(&host, SHARING_KERNEL);
    assert_eq!(vm.status().mechanism, Mechanism::HyperAlloc);
    for round in 0..ROUNDS {
        assert_eq!(free_and_use(&vm), Ok("0".into()), "round {round}");
    }
    assert_eq!(dma_faults(), [""; 0]);
}

/// The control: memory is punched while it stays mapped.
#[test]
fn what_stays_mapped_makes_the_disk_use_other_memory() {
    if with_iommu("what_stays_mapped_makes_the_disk_use_other_memory") {
        return;
    }
    let host = Host::new();
    host.set("EBB_FAIL", "vm0:unmap:1");
    let vm = run(&host, INNER_KERNEL);
    vm.forgive();
    let used = free_and_use(&vm);
    assert_ne!(used, Ok("0".into()));
}
