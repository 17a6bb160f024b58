//! A file of slots, each a page: `docs/run-directory.md`.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use ebb_units::FRAME_BYTES;
use rustix::fs::{FallocateFlags, fallocate};

use crate::slots::Slots;
use crate::{Page, Store};

/// Slots in a sparse file; a released slot takes no space once it was trimmed.
pub struct SwapFile {
    file: File,
    slots: Slots,
}

impl SwapFile {
    /// Opens the file, or makes it, with room for `count` slots. Nothing is in
    /// use until it was saved or claimed.
    ///
    /// # Errors
    /// As open(2) and ftruncate(2).
    pub fn open(path: &Path, count: u64) -> io::Result<SwapFile> {
        let mut options = File::options();
        // What it holds is the guest's: for root's eyes only.
        let file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.set_len(count * FRAME_BYTES)?;
        Ok(SwapFile { file, slots: Slots::new(count) })
    }
}

impl Store for SwapFile {
    fn save(&self, page: &Page) -> io::Result<u64> {
        let slot = self.slots.take().ok_or(io::ErrorKind::StorageFull)?;
        match self.file.write_all_at(page, slot * FRAME_BYTES) {
            Ok(()) => Ok(slot),
            Err(error) => {
                self.slots.release(slot);
                Err(error)
            }
        }
    }

    fn load(&self, slot: u64, page: &mut Page) -> io::Result<()> {
        match self.slots.is_taken(slot) {
            true => self.file.read_exact_at(page, slot * FRAME_BYTES),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn release(&self, slot: u64) {
        self.slots.release(slot);
    }

    fn trim(&self) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.slots.stale().try_for_each(|(first, count)| {
            let (offset, bytes) = (first * FRAME_BYTES, count * FRAME_BYTES);
            Ok(fallocate(&self.file, hole, offset, bytes)?)
        })
    }

    fn claim(&self, slot: u64) -> io::Result<()> {
        match self.slots.take_this(slot) {
            true => Ok(()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_page_comes_back_also_from_a_file_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        let store = SwapFile::open(&path, 8).unwrap();
        let slots: Vec<u64> = (0..8).map(|n| store.save(&[n; 4096]).unwrap()).collect();
        assert_eq!(store.save(&[9; 4096]).unwrap_err().kind(), io::ErrorKind::StorageFull);
        store.release(slots[3]);
        let before = store.file.metadata().unwrap().blocks();
        store.trim().unwrap();
        assert!(store.file.metadata().unwrap().blocks() < before);
        drop(store);
        let store = SwapFile::open(&path, 8).unwrap();
        let mut page = [0; 4096];
        assert!(store.load(slots[2], &mut page).is_err());
        store.claim(slots[2]).unwrap();
        assert!(store.claim(slots[2]).is_err());
        store.load(slots[2], &mut page).unwrap();
        assert_eq!(page, [2; 4096]);
    }
}
