//! RAM files of which nothing is evicted for now.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_units::Gfn;
use ebb_vm::Ram;

/// The RAM files that the VMM may have mapped again without telling anybody, by index.
#[derive(Default)]
pub(crate) struct DoubtedFiles(Mutex<Vec<usize>>);

impl DoubtedFiles {
    /// Doubts these files, and no others any more.
    pub(crate) fn set(&self, files: &[usize]) {
        *self.lock() = files.to_vec();
    }

    /// Whether a frame is RAM of a file that is not doubted.
    pub(crate) fn may_go(&self, ram: &Ram, gfn: Gfn) -> bool {
        ram.region_of(gfn).is_some_and(|region| !self.lock().contains(&region.file))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
