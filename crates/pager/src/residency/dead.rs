//! Content that the guest will not ask for: that of frames that the guest has freed since their
//! eviction.
//!
//! Proof: at its eviction the frame was page cache or anonymous memory; now its metadata says that
//! it was freed. No touch came in between, or the frame would not be evicted any more. So the saved
//! content is what the frame held before it was freed
//! (`docs/decisions/0012-dead-frames-at-the-fault.md`).

use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, PoisonError, RwLock};

use ebb_inspect::{Guest, PageWords};
use ebb_units::{Gfn, Gpa};

use crate::support::sparse::Sparse;

/// A guest's kernel, as the threads that bring its frames back ask it.
pub trait Witness: Send + Sync {
    /// Whether a frame that [`crate::Judge::in_use`] named has been freed since. `read` reads the
    /// guest's metadata, in about a microsecond.
    fn looks_freed(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool;
}

impl Witness for Guest {
    fn looks_freed(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool {
        Guest::looks_freed(self, gfn, read)
    }
}

/// What is known of evicted frames.
pub(crate) struct Dead {
    witness: RwLock<Option<Arc<dyn Witness>>>,
    /// A bit for each frame: by the witness's word it was in use when it was evicted.
    in_use: Sparse,
}

impl Dead {
    pub(crate) fn new(frames: u64) -> Dead {
        Dead { witness: RwLock::default(), in_use: Sparse::new(frames.div_ceil(32)) }
    }

    /// Notes whether the frame is in use as it is evicted. The caller has locked the frame's word,
    /// which does not say yet that it is evicted.
    pub(crate) fn went(&self, gfn: Gfn, in_use: bool) {
        let bit = 1 << (gfn.0 % 32);
        match in_use {
            true => drop(self.in_use.make(gfn.0 / 32).map(|bits| bits.fetch_or(bit, AcqRel))),
            false => drop(self.in_use.get(gfn.0 / 32).map(|bits| bits.fetch_and(!bit, AcqRel))),
        }
    }

    /// Judges whether the frame's content is dead. The caller has locked the frame's word. `read`
    /// reads the guest's metadata.
    pub(super) fn verdict(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> Verdict {
        let Some(witness) = self.witness() else { return Verdict::Needed };
        // The bit is read after the witness: the witness of another kernel comes with cleared bits.
        let was_in_use = self.was_in_use(gfn);
        match witness.looks_freed(gfn, read) {
            true if was_in_use => Verdict::Dead,
            true => Verdict::Unproven,
            false => Verdict::Needed,
        }
    }

    pub(super) fn was_in_use(&self, gfn: Gfn) -> bool {
        self.in_use.get(gfn.0 / 32).is_some_and(|bits| bits.load(Acquire) >> (gfn.0 % 32) & 1 != 0)
    }

    pub(super) fn believe(&self, witness: Option<Arc<dyn Witness>>) {
        let mut now = self.witness.write().unwrap_or_else(PoisonError::into_inner);
        // No thread gets the new witness before the bits of the old one's frames are cleared.
        self.in_use.clear();
        *now = witness;
    }

    /// Returns the witness of the evictor of the frame, or a later one, if the caller has locked
    /// the frame's word before.
    pub(super) fn witness(&self) -> Option<Arc<dyn Witness>> {
        self.witness.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What is known of an evicted frame that is touched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The content may be needed.
    Needed,
    /// The frame looks freed, but what it was at its eviction is not known.
    Unproven,
    /// The frame was freed, so its content is dead.
    Dead,
}
