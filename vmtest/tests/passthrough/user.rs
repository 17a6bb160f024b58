//! A QEMU that is not root, with a device that is passed through.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use vmtest::Host;
use vmtest::nested::{INNER_KERNEL, NVME_ADDRESS, with_iommu};

use crate::{behind_port, dma_faults, free_and_use, guest, pass_on, wait_disk, wait_held};

/// A user that nothing else of the host belongs to.
const USER: u32 = 4321;

/// The node by which the device's group is opened.
fn group(address: &str) -> PathBuf {
    let link = Path::new("/sys/bus/pci/devices").join(address).join("iommu_group");
    let link = fs::read_link(&link).unwrap_or_else(|error| panic!("{}: {error}", link.display()));
    Path::new("/dev/vfio").join(link.file_name().expect("a group has a number"))
}

/// Its user may open the device's group, and has no capability: it may lock no more memory than its
/// limit allows.
#[test]
fn memory_goes_and_comes_under_a_disk_of_a_qemu_without_privileges() {
    if with_iommu("user::memory_goes_and_comes_under_a_disk_of_a_qemu_without_privileges") {
        return;
    }
    let host = Host::new();
    pass_on(NVME_ADDRESS);
    let devices = behind_port(1, NVME_ADDRESS, "disk");
    let why = host.ebb(&format!("run --name a --memory 256M -- {devices}")).refused();
    for part in ["/dev/vfio/", "Permission denied", "chown", "--user"] {
        assert!(why.contains(part), "{why}");
    }
    chown(group(NVME_ADDRESS), Some(USER), None).expect("a node of the host");
    let vm = host.run(guest(INNER_KERNEL, &devices).user(&USER.to_string()));
    let status = fs::read_to_string(format!("/proc/{}/status", vm.pid())).expect("it runs");
    for line in [format!("Uid:\t{USER}\t"), "CapEff:\t0000000000000000\n".into()] {
        assert!(status.contains(&line), "{status}");
    }
    wait_held(&vm);
    wait_disk(&vm);
    assert_eq!(free_and_use(&vm), Ok("0".into()));
    // The next process maps memory, too.
    host.kill9();
    host.start();
    assert_eq!(free_and_use(&vm), Ok("0".into()));
    assert_eq!(dma_faults(), [""; 0]);
}
