//! Advice on a device's own mapping of guest memory, which vm-memory makes.

use std::io;

use ebb_units::{FRAME_BYTES, FrameRange};
use rustix::mm::{Advice, madvise};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

/// Gives the region only small pages from now on. Large folios that it has stay.
///
/// # Errors
/// As madvise(2); `EINVAL` on a kernel without transparent huge pages.
pub fn use_small_pages(region: &GuestRegionMmap) -> io::Result<()> {
    advise(region, 0, region.len(), Advice::LinuxNoHugepage)
}

/// Removes those of the frames that lie in the region from this process's page table. The memory
/// stays in its file. A region without a shared file keeps everything.
///
/// # Errors
/// As madvise(2).
pub fn forget(region: &GuestRegionMmap, frames: FrameRange) -> io::Result<()> {
    let first = region.start_addr().0;
    let start = frames.start.gpa().0.max(first);
    let end = frames.end().gpa().0.min(first.saturating_add(region.len()));
    match end.checked_sub(start) {
        Some(bytes @ FRAME_BYTES..) if is_of_file(region) => {
            advise(region, start - first, bytes, Advice::LinuxDontNeed)
        }
        _ => Ok(()),
    }
}

/// Whether memory that is not mapped is still in a file.
fn is_of_file(region: &GuestRegionMmap) -> bool {
    region.file_offset().is_some() && region.flags() & libc::MAP_SHARED != 0
}

fn advise(region: &GuestRegionMmap, offset: u64, bytes: u64, advice: Advice) -> io::Result<()> {
    let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= region.len());
    if !is_inside {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the range lies in the mapping (just checked), which lives as long as the region.
    // Neither advice changes its bytes: what is forgotten is in a shared file.
    unsafe { madvise(region.as_ptr().add(offset as usize).cast(), bytes as usize, advice)? };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use ebb_units::{Gfn, Hva};
    use vm_memory::MemoryRegionAddress;
    use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

    use super::*;
    use crate::pagemap::Pagemap;
    use crate::process::Process;
    use crate::ram_file::RamFile;
    use crate::uffd::HvaRange;

    const FRAMES: u64 = 16;
    const FIRST: u64 = 256;

    fn shared() -> GuestRegionMmap {
        let file = RamFile::create("guest-mapping-test", FRAMES * FRAME_BYTES).unwrap();
        let file = File::from(file.as_fd().try_clone_to_owned().unwrap());
        let bytes = (FRAMES * FRAME_BYTES) as usize;
        let start = GuestAddress(FIRST * FRAME_BYTES);
        GuestRegionMmap::from_range(start, bytes, Some(FileOffset::new(file, 0))).unwrap()
    }

    fn mapped(region: &GuestRegionMmap) -> u64 {
        let pagemap = Pagemap::open(&Process::own().unwrap()).unwrap();
        let start = Hva(region.as_ptr().addr() as u64);
        let mut bytes = 0;
        pagemap
            .mapped(HvaRange { start, bytes: region.len() }, |part| bytes += part.bytes)
            .unwrap();
        bytes / FRAME_BYTES
    }

    #[test]
    fn forgotten_pages_keep_their_bytes() {
        let region = shared();
        let _ = use_small_pages(&region);
        let at = |frame: u64| MemoryRegionAddress(frame * FRAME_BYTES);
        (0..FRAMES).for_each(|frame| region.write_obj(frame + 1, at(frame)).unwrap());
        assert_eq!(mapped(&region), FRAMES);
        // Frames before and after the region belong to nobody.
        for (frames, left) in [((FIRST - 9, 9), 16), ((FIRST - 9, 11), 14), ((FIRST + 12, 99), 10)]
        {
            forget(&region, FrameRange::new(Gfn(frames.0), frames.1)).unwrap();
            assert_eq!(mapped(&region), left, "{frames:?}");
        }
        for frame in 0..FRAMES {
            assert_eq!(region.read_obj::<u64>(at(frame)).unwrap(), frame + 1);
        }
    }

    /// No file has its bytes.
    #[test]
    fn a_region_without_a_file_forgets_nothing() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 8192)]).unwrap();
        memory.write_obj(5_u64, GuestAddress(4096)).unwrap();
        let region = memory.find_region(GuestAddress(0)).unwrap();
        forget(region, FrameRange::new(Gfn(0), 2)).unwrap();
        assert_eq!(memory.read_obj::<u64>(GuestAddress(4096)).unwrap(), 5);
    }
}
