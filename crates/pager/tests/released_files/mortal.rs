//! A store at which the daemon dies, and of which one slot cannot be read.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_store::{Loaded, Page, SavedBatch, Store, StoreError, StoreUsage, SwapFile};
use rustix::io::Errno;

/// A swap file. Its daemon dies when it is about to free a slot after `left` others, and the slot
/// `bad` is on a bad sector.
pub struct Mortal {
    pub file: SwapFile,
    pub left: AtomicU64,
    pub bad: Arc<AtomicU64>,
}

impl Store for Mortal {
    fn save(&self, page: &Page) -> Result<u64, StoreError> {
        self.file.save(page)
    }
    fn save_batch(&self, pages: &[Page]) -> SavedBatch {
        self.file.save_batch(pages)
    }
    fn load(&self, slot: u64, page: &mut Page) -> Result<(), StoreError> {
        if slot == self.bad.load(Relaxed) {
            return Err(io::Error::from(Errno::IO).into());
        }
        self.file.load(slot, page)
    }
    fn load_batch(&self, slot: u64, pages: &mut [Page]) -> Result<Loaded, StoreError> {
        self.file.load_batch(slot, pages)
    }
    fn claim(&self, slot: u64) -> Result<(), StoreError> {
        self.file.claim(slot)
    }
    fn release(&self, slot: u64) {
        let left = self.left.fetch_sub(1, Relaxed);
        assert!(left > 0, "the daemon dies here");
        self.file.release(slot);
    }
    fn trim(&self) -> Result<(), StoreError> {
        self.file.trim()
    }
    fn usage(&self) -> StoreUsage {
        self.file.usage()
    }
}
