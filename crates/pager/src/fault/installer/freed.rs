//! Frames whose content is dead get memory without a read.

use std::io;

use ebb_ledger::{Content, LockedFrame};
use ebb_units::{FrameRange, Gfn};

use crate::fault::installer::Installer;
use crate::frames::words::Served;

/// Linux frees pages to its per-processor lists, and from there, in batches of this size
/// at most (`pcp->batch`).
const FREED_TOGETHER: u64 = 63;

impl Installer {
    /// A touched frame comes back as zeros: its old content is dead, or about to be
    /// overwritten.
    pub(crate) fn install_blank(&self, gfn: Gfn, held: LockedFrame<'_>) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        // Zeros until somebody has written: what a hole on record as resident is.
        if let Err(error) = self.frames.fill(gfn, 0) {
            self.frames.after(held.abandon(), frame);
            return Err(error);
        }
        self.frames.devices().map(frame);
        // What its slot holds it never will again.
        let _ = self.residency.leave(gfn, held, Content::Resident);
        self.frames.wake(frame).map(|()| Served::Done)
    }

    /// A frame that was just emptied, since the guest had freed it, gets memory, and with
    /// it those around it of which the same holds: Linux hands out together, and often
    /// from the last to the first, what it freed together. `false`: it has none yet.
    pub(crate) fn install_freed(&self, gfn: Gfn) -> io::Result<bool> {
        let behind = (self.frames.frames_to_border(gfn) - 1).min(FREED_TOGETHER);
        let before = (gfn.index_in_huge() as u64).min(FREED_TOGETHER);
        let is_freed = |gfn: &Gfn| self.residency.drop_if_dead(*gfn);
        let behind = (1..=behind).map(|by| Gfn(gfn.0 + by)).take_while(is_freed).count();
        let before = (1..=before).map(|by| Gfn(gfn.0 - by)).take_while(is_freed).count();
        let first = Gfn(gfn.0 - before as u64);
        self.install_run(FrameRange::new(first, (before + 1 + behind) as u64))
    }
}
