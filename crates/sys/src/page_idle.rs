//! Which page frames of the host were used since they were marked idle: the kernel's idle page
//! tracking (`Documentation/admin-guide/mm/idle_page_tracking.rst`), which kernels built with
//! `CONFIG_IDLE_PAGE_TRACKING` have.
//!
//! A frame has one bit, in words of 64. The kernel checks every page table that maps a frame, KVM's
//! among them. No user of the frame waits for that.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const BITMAP: &str = "/sys/kernel/mm/page_idle/bitmap";
/// Frames for each word.
pub const FRAMES_PER_WORD: u64 = u64::BITS as u64;
const WORD_BYTES: usize = size_of::<u64>();

/// The bitmap of all frames.
pub struct PageIdle {
    bitmap: File,
}

impl PageIdle {
    /// Opens the bitmap.
    ///
    /// # Errors
    /// `NotFound`: the kernel has none. Otherwise as open(2).
    pub fn open() -> io::Result<PageIdle> {
        Ok(PageIdle { bitmap: File::options().read(true).write(true).open(BITMAP)? })
    }

    /// Reads words from the `first` on. A set bit: the frame was marked and not used since. Huge
    /// pages have a bit for their first frame only. Frames that nothing reclaims have none.
    ///
    /// # Errors
    /// From the host.
    pub fn read(&self, first: u64, words: &mut [u64]) -> io::Result<()> {
        let mut bytes = vec![0; words.len() * WORD_BYTES];
        // The last frames of the host may not fill a word. The kernel does not show those.
        let mut got = 0;
        while got < bytes.len() {
            match self.bitmap.read_at(&mut bytes[got..], offset(first) + got as u64)? {
                0 => break,
                count => got += count,
            }
        }
        let (parts, _) = bytes.as_chunks::<WORD_BYTES>();
        words.iter_mut().zip(parts).for_each(|(word, part)| *word = u64::from_ne_bytes(*part));
        Ok(())
    }

    /// Marks those frames idle whose bits are set in `words`, which begin at the word `first`. The
    /// mark of no other frame changes.
    ///
    /// # Errors
    /// From the host.
    pub fn mark(&self, first: u64, words: &[u64]) -> io::Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut put = 0;
        while put < bytes.len() {
            match self.bitmap.write_at(&bytes[put..], offset(first) + put as u64) {
                // As in `read`, this is beyond the last frame.
                Ok(0) => break,
                Err(error) if error.raw_os_error() == Some(libc::ENXIO) => break,
                Ok(count) => put += count,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn offset(word: u64) -> u64 {
    word * WORD_BYTES as u64
}
