//! RAM that a VMM has no more: what proves that, and what is at its place.

use std::io;

use ebb_sys::process::{Process, Vma};
use ebb_units::Hva;

use crate::ram::Ram;

/// How `/proc/PID/fd` names guest memory.
const MEMFD: &str = "/memfd:";

/// Which of these files, by their inode numbers, the VMM has neither mapped nor open: nothing can
/// bring one of them back to its guest.
///
/// Looked at are mappings, descriptors, and the mappings once more, so that a file is found that is
/// mapped or closed meanwhile. A VMM that is about to end has no mappings at all: that proves
/// nothing of its memory.
///
/// # Errors
/// As reading `/proc/PID`: then nothing is proved.
pub fn gone(process: &Process, inodes: &[u64]) -> io::Result<Vec<u64>> {
    let absent = |mappings: &[Vma], inodes: &[u64]| -> Vec<u64> {
        let is_mapped = |inode: u64| mappings.iter().any(|vma| vma.inode == inode);
        inodes.iter().copied().filter(|&inode| !is_mapped(inode)).collect()
    };
    let suspects = absent(&process.mappings()?, inodes);
    if suspects.is_empty() {
        return Ok(suspects);
    }
    let open = process.open_inodes(MEMFD)?;
    let suspects: Vec<u64> = suspects.into_iter().filter(|inode| !open.contains(inode)).collect();
    let mappings = process.mappings()?;
    // Last: until now its number was nobody else's.
    if mappings.is_empty() || process.has_ended()? {
        return Ok(Vec::new());
    }
    Ok(absent(&mappings, &suspects))
}

/// Makes sure that the VMM has all of its RAM, but for what is gone, mapped where it had.
///
/// # Errors
/// It has not: something else may be there. As reading `/proc/PID/maps`.
pub fn check_mapped(process: &Process, ram: &Ram) -> io::Result<()> {
    let mappings = process.mappings()?;
    for region in ram.regions() {
        let Some(backing) = ram.files().get(region.file) else { continue };
        let inode = backing.file.identity()?.1;
        if !is_mapped(&mappings, region.hva, region.bytes, (inode, region.offset)) {
            return Err(io::Error::other(format!(
                "QEMU has its RAM at guest-physical address {:#x} no more where it had it",
                region.gpa.0
            )));
        }
    }
    Ok(())
}

/// Whether a range shows this file from this offset on, in one mapping or several in a row.
fn is_mapped(mappings: &[Vma], start: Hva, bytes: u64, (inode, offset): (u64, u64)) -> bool {
    let mut at = start.0;
    let Some(end) = start.0.checked_add(bytes) else { return false };
    for vma in mappings.iter().filter(|vma| vma.inode == inode && vma.shared_write) {
        let into = at.wrapping_sub(vma.start.0);
        let is_next = into < vma.bytes && vma.offset.wrapping_add(into) == offset + (at - start.0);
        if at < end && is_next {
            at = vma.start.0 + vma.bytes;
        }
    }
    at >= end
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use ebb_sys::mapping::Mapping;
    use ebb_sys::ram_file::RamFile;
    use ebb_units::Gpa;

    use super::*;
    use crate::ram::{Backing, Region};

    const BYTES: u64 = 1 << 20;
    const NONE: [u64; 0] = [];

    #[test]
    fn a_file_is_gone_once_it_is_neither_mapped_nor_open() {
        let process = Process::own().expect("this process");
        let file = RamFile::create("unplugged-test", BYTES).expect("a memfd");
        let inode = file.identity().expect("its inode").1;
        let mapping = Mapping::new(&file, 0, BYTES).expect("mapped");
        let gone = || gone(&process, &[inode]).expect("/proc");
        assert_eq!(gone(), NONE);
        let file = {
            let again = RamFile::create("unplugged-test", BYTES).expect("a memfd");
            drop(file);
            again
        };
        assert_eq!(gone(), NONE, "it is mapped");
        drop(mapping);
        assert_eq!(gone(), [inode]);
        drop(file);
    }

    #[test]
    fn an_open_file_is_not_gone() {
        let process = Process::own().expect("this process");
        let file = RamFile::create("unplugged-test", BYTES).expect("a memfd");
        let inode = file.identity().expect("its inode").1;
        assert_eq!(gone(&process, &[inode]).expect("/proc"), NONE);
    }

    #[test]
    fn a_vmm_that_has_ended_proves_nothing() {
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let process = Process::open(child.id() as i32).expect("not reaped yet");
        let mut fds = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, None).expect("its end");
        assert_eq!(gone(&process, &[1 << 40]).unwrap_or_default(), NONE);
        child.wait().expect("reaped");
        assert_eq!(gone(&process, &[1 << 40]).unwrap_or_default(), NONE);
    }

    #[test]
    fn another_mapping_in_its_place_is_noticed() {
        let process = Process::own().expect("this process");
        let create = || RamFile::create("unplugged-test", BYTES).expect("a memfd");
        let (file, other) = (create(), create());
        let guest = Mapping::new(&file, 0, BYTES).expect("mapped");
        let ram = |file: RamFile, hva, offset, bytes| {
            let mapping = Mapping::new(&file, 0, BYTES).expect("mapped");
            let region = Region { gpa: Gpa(0), bytes, hva, file: 0, offset };
            Ram::new(vec![region], vec![Backing { file, mapping }]).expect("a layout")
        };
        let check = |ram: &Ram| check_mapped(&process, ram);
        let (hva, half) = (guest.address(), BYTES / 2);
        let ours = ram(file, hva, 0, BYTES);
        check(&ours).expect("as it was");
        check(&ram(other, hva, 0, BYTES)).expect_err("another file");
        let file =
            || RamFile::from(ours.files()[0].file.as_fd().try_clone_to_owned().expect("dup"));
        check(&ram(file(), Hva(hva.0 + half), half, half)).expect("its second half");
        check(&ram(file(), Hva(hva.0 + half), 0, half)).expect_err("another offset");
        drop(guest);
        check(&ours).expect_err("unmapped");
        ours.set_gone(0);
        check(&ours).expect("nothing is left to be there");
    }
}
