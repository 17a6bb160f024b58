//! Evicting frames that are in use.
//!
//! The order is the only safe one: protect, ask what is in flight, save or prove, check that nobody
//! wrote, punch. *In flight*: a request of the VMM that pinned a page before it was protected
//! writes past the protection (`docs/decisions/0031-*`).

pub mod evicted;
pub mod eviction;
pub mod frames_in_use;
mod room;
mod spare;
pub mod write_back;

use std::sync::Arc;

use ebb_ledger::{Content, LockedFrame};
use ebb_units::{FrameRange, Gfn};

use crate::folios::FolioMap;
use crate::frames::Frames;
use crate::residency::Residency;
use spare::Spare;

/// A locked and protected frame.
pub(crate) struct ProtectedFrame<'l> {
    pub(crate) gfn: Gfn,
    pub(crate) word: LockedFrame<'l>,
}

impl ProtectedFrame<'_> {
    pub(crate) fn frame(&self) -> FrameRange {
        FrameRange::new(self.gfn, 1)
    }
}

/// Locked frames in order.
pub(crate) type Piece<'l> = Vec<ProtectedFrame<'l>>;

/// Evicts the frames of one VM.
pub struct Evictor {
    frames: Arc<Frames>,
    folios: Arc<FolioMap>,
    residency: Arc<Residency>,
    spare: Spare,
}

impl Evictor {
    pub(crate) fn new(
        frames: &Arc<Frames>,
        folios: &Arc<FolioMap>,
        residency: &Arc<Residency>,
    ) -> Evictor {
        Evictor {
            frames: Arc::clone(frames),
            folios: Arc::clone(folios),
            residency: Arc::clone(residency),
            spare: Spare::default(),
        }
    }

    /// Frees the memory of buffers that were not used for a second, and the guest's content in them.
    /// The worker calls it on each tick.
    pub fn free_idle(&self) {
        self.spare.free_idle();
    }

    /// Unprotects and unlocks frames that stay resident.
    pub(crate) fn open_all<'l>(&self, held: impl IntoIterator<Item = ProtectedFrame<'l>>) {
        for held in held {
            let frame = held.frame();
            self.frames.report("unprotect", self.frames.unprotect(frame));
            // A commit may have changed the content.
            let wanted = held.word.unlock(Content::Resident);
            self.frames.after(wanted, frame);
        }
    }
}
