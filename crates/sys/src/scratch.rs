//! Private memory for content in transit, which takes room only where it was touched.

use std::alloc::{Layout, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use ebb_units::FRAME_BYTES;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Whole pages of zeros that one owner writes and reads. The heap would keep freed memory, and
/// write zeros to memory that is allocated again.
pub struct Scratch {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns what `start` points to, as a Box would.
unsafe impl Send for Scratch {}
// SAFETY: shared references only read.
unsafe impl Sync for Scratch {}

impl Scratch {
    /// Returns at least `bytes` bytes, in whole pages, at least one page. Core dumps do not contain
    /// it.
    ///
    /// Ends the process where there is no address space left, as the heap does.
    pub fn new(bytes: usize) -> Scratch {
        let page = FRAME_BYTES as usize;
        let bytes = bytes.max(page).next_multiple_of(page);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, prot, MapFlags::PRIVATE) };
        let start = start.ok().and_then(|start| NonNull::new(start.cast::<u8>()));
        let layout = || Layout::from_size_align(bytes, page).unwrap_or(Layout::new::<u8>());
        let start = start.unwrap_or_else(|| handle_alloc_error(layout()));
        for advice in [Advice::LinuxDontDump, Advice::LinuxNoHugepage] {
            // A huge page would take room for neighbouring buffers, too. A kernel without huge
            // pages refuses the advice, and needs none.
            // SAFETY: neither changes what the range holds.
            let _ = unsafe { madvise(start.as_ptr().cast(), bytes, advice) };
        }
        Scratch { start, bytes }
    }

    /// Returns its memory to the host. It reads as zeros again.
    pub fn clear(&mut self) {
        // SAFETY: it is private memory of ours, borrowed exclusively, for which zeros are valid
        // bytes.
        let cleared =
            unsafe { madvise(self.start.as_ptr().cast(), self.bytes, Advice::LinuxDontNeed) };
        if cleared.is_err() {
            // The memory is locked.
            self.fill(0);
        }
    }
}

impl Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped with this size, zeros at first, and owned.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and nothing refers to it any more.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many of its pages are in memory.
    fn resident(scratch: &Scratch) -> usize {
        let mut pages = vec![0u8; scratch.len() / FRAME_BYTES as usize];
        // SAFETY: the kernel writes a byte for each page of a mapping of ours.
        let got = unsafe {
            let start = scratch.start.as_ptr().cast();
            libc::mincore(start, scratch.bytes, pages.as_mut_ptr())
        };
        assert_eq!(got, 0);
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn only_what_was_touched_takes_room() {
        let mut scratch = Scratch::new(4 << 20);
        assert_eq!(resident(&scratch), 0);
        scratch[5 << 12] = 1;
        assert_eq!(resident(&scratch), 1);
        assert_eq!((scratch[5 << 12], scratch[6 << 12]), (1, 0));
        scratch.clear();
        assert_eq!(resident(&scratch), 0);
        assert_eq!(scratch[5 << 12], 0);
    }

    #[test]
    fn it_is_whole_pages() {
        for (bytes, all) in [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)] {
            let scratch = Scratch::new(bytes);
            assert_eq!((scratch.len(), scratch.as_ptr().addr() % 4096), (all, 0));
        }
    }
}
