//! The group of a VM's process in that of its VM: the memory and the processor time that Ebb takes
//! for a VM count there.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::hierarchy::{QEMU, SWAP};
use super::processes::MEMBERS;

/// The group of the VM's process in that of its VM.
pub(super) const SERVICE: &str = "ebb";
/// Only groups of version 2 have it.
const VERSION_2: &str = "cgroup.controllers";

/// Puts this process beside the QEMU in these groups. A group that an earlier release made for QEMU
/// alone is left as it is. So is one of version 2 whose memory may go to the host's swap: this
/// process has keys and content of the guest, and its own group may keep them out of there.
pub fn enter(of_qemu: &[PathBuf]) {
    let may_enter = |directory: &&PathBuf| {
        directory.ends_with(QEMU) && !directory.parent().is_some_and(may_be_swapped)
    };
    for directory in of_qemu.iter().filter(may_enter) {
        let service = directory.with_file_name(SERVICE);
        if let Err(error) = enter_one(&service) {
            tracing::warn!(
                "{}: {error}: memory that Ebb takes for this VM counts in another group",
                service.display()
            );
        }
    }
}

fn may_be_swapped(of_vm: &Path) -> bool {
    let limit = fs::read_to_string(of_vm.join(SWAP)).unwrap_or_default();
    of_vm.join(VERSION_2).exists() && limit.trim() != "0"
}

fn enter_one(service: &Path) -> io::Result<()> {
    match fs::create_dir(service) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // "0" means the process that writes it.
    fs::write(service.join(MEMBERS), "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_may_be_swapped_is_not_entered() {
        let home = tempfile::tempdir().unwrap();
        let of_qemu = home.path().join(QEMU);
        let service = home.path().join(SERVICE);
        fs::create_dir(&of_qemu).unwrap();
        fs::write(home.path().join(VERSION_2), "memory pids").unwrap();
        for limit in ["max\n", ""] {
            fs::write(home.path().join(SWAP), limit).unwrap();
            enter(std::slice::from_ref(&of_qemu));
            assert!(!service.exists(), "{limit}");
        }
        fs::write(home.path().join(SWAP), "0\n").unwrap();
        enter(std::slice::from_ref(&of_qemu));
        assert_eq!(fs::read_to_string(service.join(MEMBERS)).unwrap(), "0");
    }

    #[test]
    fn a_group_of_an_earlier_release_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        enter(&[home.path().join("web.1")]);
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
    }
}
