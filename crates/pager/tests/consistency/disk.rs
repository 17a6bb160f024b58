//! The guest's disk.

use std::sync::{Mutex, MutexGuard};

use ebb_pager::testing::page_of;
use ebb_store::Page;

pub const BLOCKS: u64 = 10;

/// A disk that loses nothing: a block is on it as a whole or not at all.
pub struct FakeDisk(Mutex<Vec<Page>>);

impl FakeDisk {
    pub fn new() -> FakeDisk {
        FakeDisk(Mutex::new(vec![page_of(0); BLOCKS as usize]))
    }

    pub fn blocks(&self) -> MutexGuard<'_, Vec<Page>> {
        self.0.lock().unwrap()
    }
}
