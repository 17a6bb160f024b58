//! Stores whose files somebody overwrites between two processes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_store::Medium;

/// A disk in memory.
pub(crate) struct Ramdisk(Mutex<Vec<u8>>);

impl Ramdisk {
    pub(crate) fn new(bytes: usize) -> Ramdisk {
        Ramdisk(Mutex::new(vec![0; bytes]))
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Medium for &Ramdisk {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let at = usize::try_from(offset).map_err(io::Error::other)?;
        let disk = self.bytes();
        let there = disk.get(at..).unwrap_or_default();
        let count = there.len().min(bytes.len());
        bytes[..count].copy_from_slice(&there[..count]);
        Ok(count)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        let at = usize::try_from(offset).map_err(io::Error::other)?;
        let mut disk = self.bytes();
        let place = disk.get_mut(at..at + bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
        place.copy_from_slice(bytes);
        Ok(bytes.len())
    }

    fn discard(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn is_direct(&self) -> bool {
        false
    }
}

/// Overwrites words of a file: `(word, value)` of 3 and 8 bytes each. An odd first byte leaves only
/// the low bits of the word's number, so that the file's beginning is hit more often.
pub(crate) fn overwrite(path: &Path, data: &[u8]) {
    let Some((first, changes)) = data.split_first() else { return };
    let near = if first & 1 == 1 { 0x3ff } else { u64::MAX };
    let file = File::options().write(true).open(path).expect("the file is there");
    let words = file.metadata().expect("the file is there").len() / 8;
    for [low, middle, high, value @ ..] in changes.as_chunks::<11>().0 {
        let word = u64::from(u32::from_le_bytes([*low, *middle, *high, 0])) & near;
        file.write_all_at(value, word % words * 8).expect("room for it");
    }
}

/// Returns a page that compresses, and differs from all others.
pub(crate) fn page(seed: u64) -> ebb_store::Page {
    let mut page = [0; 4096];
    for (index, bytes) in (0u64..).zip(page.as_chunks_mut::<8>().0) {
        *bytes = ((seed << 32) | (index / 8)).to_le_bytes();
    }
    page
}
