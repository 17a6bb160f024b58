//! Frames that a device of ours uses right now: they stay resident.
//!
//! The device pins, then looks at the frame's word. The evictor locks the word, then looks at the
//! pins. With a fence between the two steps on both sides, at least one side sees the other: the
//! evictor then lets the frame stay, or the device waits and looks again.

use std::sync::atomic::Ordering::{AcqRel, SeqCst};
use std::sync::atomic::fence;

use ebb_units::{FrameRange, Gfn};

use crate::support::sparse::Sparse;

/// How many requests use each frame.
pub(crate) struct Pins(Sparse);

impl Pins {
    pub(crate) fn new(frames: u64) -> Pins {
        Pins(Sparse::new(frames))
    }

    pub(crate) fn pin(&self, gfn: Gfn) {
        if let Some(pins) = self.0.make(gfn.0) {
            pins.fetch_add(1, AcqRel);
        }
        fence(SeqCst);
    }

    pub(crate) fn unpin(&self, gfn: Gfn) {
        if let Some(pins) = self.0.get(gfn.0) {
            let before = pins.fetch_sub(1, AcqRel);
            debug_assert!(before > 0, "{gfn:?} is not pinned");
        }
    }

    /// Whether the frame is pinned. The caller has locked the frame's word.
    pub(crate) fn has(&self, gfn: Gfn) -> bool {
        self.has_any(FrameRange::new(gfn, 1))
    }

    /// Whether any of the frames is pinned. The caller has made sure that no new pin comes unseen.
    pub(crate) fn has_any(&self, frames: FrameRange) -> bool {
        fence(SeqCst);
        self.0.has_any(frames.start.0, frames.count)
    }
}
