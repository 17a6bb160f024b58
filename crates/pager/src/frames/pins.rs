//! Frames that a device of ours uses right now: they stay where they are.
//!
//! The device pins, then looks at the frame's word; whoever evicts locks the word,
//! then looks at the pins. With a fence between the two on both sides at least one
//! of them sees the other: who evicts lets go, the device waits and looks again.

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
            pins.fetch_sub(1, AcqRel);
        }
    }

    /// As the holder of the frame's word.
    pub(crate) fn has(&self, gfn: Gfn) -> bool {
        self.has_any(FrameRange::new(gfn, 1))
    }

    /// As whoever has made sure that no more come unseen.
    pub(crate) fn has_any(&self, frames: FrameRange) -> bool {
        fence(SeqCst);
        self.0.has_any(frames.start.0, frames.count)
    }
}
