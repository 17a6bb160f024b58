//! RAM that a VMM no longer has: the proof of that, and what is mapped in its place.

use std::io;

use ebb_sys::process::{Process, Vma};
use ebb_sys::uffd::HvaRange;
use ebb_units::Hva;

use crate::ram::{Ram, Region};

/// Prefix by which `/proc/PID/fd` names guest memory.
const MEMFD: &str = "/memfd:";

/// Returns those of these files, by inode number, that the VMM has neither mapped nor open. Nothing
/// can bring such a file back to its guest.
///
/// Looks at the mappings, then the descriptors, then the mappings again, so that it finds a file
/// that is mapped or closed in between. A VMM that is about to end has no mappings at all, which
/// proves nothing about its memory.
///
/// # Errors
/// As reading `/proc/PID`. Nothing is proved then.
pub fn absent(process: &Process, inodes: &[u64]) -> io::Result<Vec<u64>> {
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
    // This check is last: it shows that the PID was not reused before.
    if mappings.is_empty() || process.has_ended()? {
        return Ok(Vec::new());
    }
    Ok(absent(&mappings, &suspects))
}

/// Returns those of `ranges`, each in one region of the RAM, at which the VMM has that region
/// mapped. At the others it has something else or nothing.
///
/// # Errors
/// As reading `/proc/PID/maps`. Nothing is known then.
pub fn mapped(process: &Process, ram: &Ram, ranges: &[HvaRange]) -> io::Result<Vec<HvaRange>> {
    let mappings = process.mappings()?;
    let mut found = Vec::new();
    for range in ranges {
        let into = |region: &Region| {
            range.start.0.checked_sub(region.hva.0).filter(|into| *into < region.bytes)
        };
        let place = ram.regions().find_map(|region| Some((region, into(region)?)));
        let Some((region, into)) = place else { continue };
        let Some(backing) = ram.files().get(region.file) else { continue };
        let inode = backing.identity()?.1;
        if is_mapped(&mappings, range.start, range.bytes, (inode, region.offset + into)) {
            found.push(*range);
        }
    }
    Ok(found)
}

/// Whether a range shows this file from this offset on, in one mapping or in several in a row.
pub(crate) fn is_mapped(
    mappings: &[Vma],
    start: Hva,
    bytes: u64,
    (inode, offset): (u64, u64),
) -> bool {
    let mut at = start.0;
    let Some(end) = start.0.checked_add(bytes) else { return false };
    for vma in mappings.iter().filter(|vma| vma.inode == inode && vma.shared_write) {
        let into = at.wrapping_sub(vma.start.0);
        let is_next =
            into < vma.bytes && vma.offset.wrapping_add(into) == offset.wrapping_add(at - start.0);
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
    use crate::ram::Backing;

    const BYTES: u64 = 1 << 20;
    const NONE: [u64; 0] = [];

    #[test]
    fn a_file_has_left_once_it_is_neither_mapped_nor_open() {
        let process = Process::own().expect("this process");
        let file = RamFile::create("unplugged-test", BYTES).expect("a memfd");
        let inode = file.identity().expect("its inode").1;
        let mapping = Mapping::new(&file, 0, BYTES).expect("mapped");
        let absent = || absent(&process, &[inode]).expect("/proc");
        assert_eq!(absent(), NONE);
        let file = {
            let again = RamFile::create("unplugged-test", BYTES).expect("a memfd");
            drop(file);
            again
        };
        assert_eq!(absent(), NONE, "it is mapped");
        drop(mapping);
        assert_eq!(absent(), [inode]);
        drop(file);
    }

    #[test]
    fn an_open_file_has_not_left() {
        let process = Process::own().expect("this process");
        let file = RamFile::create("unplugged-test", BYTES).expect("a memfd");
        let inode = file.identity().expect("its inode").1;
        assert_eq!(absent(&process, &[inode]).expect("/proc"), NONE);
    }

    #[test]
    fn a_vmm_that_has_ended_proves_nothing() {
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let process = Process::open(child.id() as i32).expect("not reaped yet");
        let mut fds = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, None).expect("its end");
        assert_eq!(absent(&process, &[1 << 40]).unwrap_or_default(), NONE);
        child.wait().expect("reaped");
        assert_eq!(absent(&process, &[1 << 40]).unwrap_or_default(), NONE);
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
            Ram::new(vec![region], vec![Backing::new(file, mapping)]).expect("a layout")
        };
        let is_there = |ram: &Ram| {
            let all: Vec<HvaRange> = ram.regions().map(Region::hva_range).collect();
            mapped(&process, ram, &all).expect("/proc") == all
        };
        let (hva, half) = (guest.address(), BYTES / 2);
        let again = file.as_fd().try_clone_to_owned().expect("dup");
        let ours = ram(file, hva, 0, BYTES);
        assert!(is_there(&ours), "as it was");
        assert!(!is_there(&ram(other, hva, 0, BYTES)), "another file");
        let file = || RamFile::from(again.try_clone().expect("dup"));
        assert!(is_there(&ram(file(), Hva(hva.0 + half), half, half)), "its second half");
        assert!(!is_there(&ram(file(), Hva(hva.0 + half), 0, half)), "another offset");
        let end = HvaRange { start: Hva(hva.0 + half), bytes: half };
        assert_eq!(mapped(&process, &ours, &[end]).expect("/proc"), [end], "a part of it");
        drop(guest);
        assert!(!is_there(&ours), "unmapped");
        ours.set_unplugged(0);
        assert!(is_there(&ours), "nothing is left to be there");
    }
}
