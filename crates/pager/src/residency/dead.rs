//! Content that nobody will ask for: of frames that the guest has freed since they went.
//!
//! Proof: when the frame went, it was page cache or anonymous memory; now its metadata
//! says that it was freed. No touch came in between, or it would not be elsewhere any
//! more; so what was saved is what it held before it was freed
//! (`docs/decisions/0012-dead-frames-at-the-fault.md`).

use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, PoisonError, RwLock};

use ebb_inspect::{Guest, PageWords};
use ebb_units::{Gfn, Gpa};

use crate::support::sparse::Sparse;

/// A guest's kernel, for threads that bring its frames back.
pub trait Witness: Send + Sync {
    /// Whether a frame that [`crate::Judge::in_use`] told of has been freed since. `read` reads
    /// the guest's metadata, in about a microsecond.
    fn looks_freed(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool;
}

impl Witness for Guest {
    fn looks_freed(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool {
        Guest::looks_freed(self, gfn, read)
    }
}

/// What is known of the frames that are elsewhere.
pub(crate) struct Dead {
    witness: RwLock<Option<Arc<dyn Witness>>>,
    /// A bit a frame: in use, by the witness's word, when it went.
    in_use: Sparse,
}

impl Dead {
    pub(crate) fn new(frames: u64) -> Dead {
        Dead { witness: RwLock::default(), in_use: Sparse::new(frames.div_ceil(32)) }
    }

    /// As the holder of the frame's word, before it is on record as elsewhere.
    pub(crate) fn went(&self, gfn: Gfn, in_use: bool) {
        let bit = 1 << (gfn.0 % 32);
        match in_use {
            true => drop(self.in_use.make(gfn.0 / 32).map(|bits| bits.fetch_or(bit, AcqRel))),
            false => drop(self.in_use.get(gfn.0 / 32).map(|bits| bits.fetch_and(!bit, AcqRel))),
        }
    }

    /// As the holder of the frame's word; `read` reads the guest's metadata.
    pub(super) fn verdict(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> Verdict {
        let Some(witness) = self.witness() else { return Verdict::Needed };
        // After the witness: that of another kernel comes with cleared bits.
        let was_in_use = self.was_in_use(gfn);
        match witness.looks_freed(gfn, read) {
            true if was_in_use => Verdict::Dead,
            true => Verdict::Unproven,
            false => Verdict::Needed,
        }
    }

    fn was_in_use(&self, gfn: Gfn) -> bool {
        self.in_use.get(gfn.0 / 32).is_some_and(|bits| bits.load(Acquire) >> (gfn.0 % 32) & 1 != 0)
    }

    pub(super) fn believe(&self, witness: Option<Arc<dyn Witness>>) {
        let mut now = self.witness.write().unwrap_or_else(PoisonError::into_inner);
        // Nobody has the new one before the bits of the old one's frames are gone.
        self.in_use.clear();
        *now = witness;
    }

    /// After the frame's word was locked: the witness of whoever evicted it, or a later one.
    pub(super) fn witness(&self) -> Option<Arc<dyn Witness>> {
        self.witness.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What is known of a frame that is elsewhere and wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It may be needed.
    Needed,
    /// It looks freed, but what it was when it went is not known.
    Unproven,
    /// It was freed.
    Dead,
}
