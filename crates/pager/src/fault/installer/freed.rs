//! Frames whose content is dead get memory without a read.

use std::io;

use ebb_ledger::{Content, LockedFrame};
use ebb_units::{FrameRange, Gfn};

use crate::fault::installer::Installer;
use crate::frames::words::Served;

/// Most pages that Linux frees together: it frees pages to its per-processor lists, and from there
/// in batches of at most this size (`pcp->batch`).
const FREED_TOGETHER: u64 = 63;
/// Most pages that come for a touch of one of them.
const AROUND_MOST: usize = 1 + 2 * FREED_TOGETHER as usize;

impl Installer {
    /// Gives a touched frame zeros: its old content is dead, or is about to be overwritten.
    pub(crate) fn install_blank(&self, gfn: Gfn, held: LockedFrame<'_>) -> io::Result<Served> {
        debug_assert!(held.content().is_evicted(), "{gfn:?}: {:?}", held.content());
        let frame = FrameRange::new(gfn, 1);
        // Zeros until somebody writes: the same as a hole that is resident on record.
        let filled = self.frames.fill(gfn, 0);
        if let Err(error) = filled.and_then(|()| self.frames.devices().map(frame)) {
            self.frames.after(held.abandon(), frame);
            return Err(error);
        }
        // The frame will never hold the slot's content again.
        let _ = self.residency.leave(gfn, held, Content::Resident);
        self.frames.wake(frame).map(|()| Served::Done)
    }

    /// Gives memory to a frame that was just made empty because the guest had freed it, and to the
    /// frames around it of which the same holds: Linux hands out together what it freed together,
    /// and often from the last to the first. No more come than there is room for. `false`: the frame
    /// has no memory yet.
    pub(crate) fn install_freed(&self, gfn: Gfn) -> io::Result<bool> {
        let share = self.room.coming().share(AROUND_MOST, || self.room.room());
        let others = share.frames() as u64 - 1;
        let is_freed = |gfn: &Gfn| self.residency.drop_if_dead(*gfn);
        let behind = (self.frames.frames_to_border(gfn) - 1).min(FREED_TOGETHER).min(others);
        let behind = (1..=behind).map(|by| Gfn(gfn.0 + by)).take_while(is_freed).count() as u64;
        let before = (gfn.index_in_huge() as u64).min(FREED_TOGETHER).min(others - behind);
        let before = (1..=before).map(|by| Gfn(gfn.0 - by)).take_while(is_freed).count() as u64;
        self.install_run(FrameRange::new(Gfn(gfn.0 - before), before + 1 + behind))
    }
}
