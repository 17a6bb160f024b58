//! Slots that resident frames keep are dropped or given up.

use super::kept::WORD_SLOTS;
use crate::frames::words::{Served, again};
use crate::residency::Residency;
use crate::support::counters::{add, subtract};
use ebb_store::MEMORY_SLOTS;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

impl Residency {
    /// Drops the slot that the frame keeps, and returns whether there was one. The caller has
    /// locked the frame's word, which names no slot.
    pub(crate) fn drop_slot(&self, gfn: Gfn) -> bool {
        let Some(slot) = self.kept.slot(gfn) else { return false };
        self.kept.clear(gfn);
        self.kept.mark(slot, false);
        self.store.release(slot);
        subtract(&self.frames.counters().clean_frames, 1);
        true
    }

    /// Drops the slots that these frames keep. The caller has locked their words.
    pub(crate) fn drop_slots(&self, frames: FrameRange) {
        for gfn in self.kept.among(frames) {
            self.drop_slot(gfn);
        }
    }

    /// Decides whether a frame that was just filled from a slot keeps the slot, and returns the
    /// result. The caller has locked the frame.
    pub(crate) fn keep_slot(&self, gfn: Gfn, slot: u64) -> bool {
        let keeps = slot < MEMORY_SLOTS && self.kept.keep(gfn, slot);
        add(&self.frames.counters().clean_frames, u64::from(keeps));
        keeps
    }

    /// Whether the frame keeps a slot: if it has not changed since, its eviction needs no write.
    pub fn keeps_slot(&self, gfn: Gfn) -> bool {
        self.kept.slot(gfn).is_some()
    }

    /// Gives up at most `most` slots that frames keep. Goes in the order of the slots, from where
    /// the last call ended: slots that were written first are given up first, and free slots lie
    /// together. Returns how many were given up: fewer only if there are no more, except those of
    /// locked frames.
    pub fn give_up_kept(&self, most: usize) -> usize {
        let (words, hand) = (self.kept.words, &self.kept.hand);
        let (start, mut given) = (hand.load(Relaxed), 0);
        for at in (start..words).chain(0..start) {
            if given == most || self.frames.counters().clean_frames.load(Relaxed) == 0 {
                break;
            }
            hand.store(at, Relaxed);
            let bits = self.kept.slots.get(at).map_or(0, |word| word.load(Acquire));
            let each = (0..WORD_SLOTS).filter(|bit| bits >> bit & 1 != 0);
            for slot in each.map(|bit| at * WORD_SLOTS + bit) {
                let owner = self.owners.get(slot).filter(|_| given < most);
                given += usize::from(owner.is_some_and(|gfn| self.give_up(gfn, |now| now == slot)));
            }
        }
        given
    }

    /// Gives up the slots that these frames keep, except those of locked frames.
    pub(crate) fn give_up_in(&self, frames: FrameRange) {
        for gfn in self.kept.among(frames) {
            self.give_up(gfn, |_| true);
        }
    }

    fn give_up(&self, gfn: Gfn, wanted: impl Fn(u64) -> bool) -> bool {
        if !self.kept.slot(gfn).is_some_and(&wanted) {
            return false;
        }
        let Ok(word) = self.frames.ledger().lock_frame(gfn) else { return false };
        // The frame may keep another slot by now, or none.
        let given = self.kept.slot(gfn).is_some_and(wanted) && self.drop_slot(gfn);
        self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
        given
    }

    /// Gives up all kept slots. Frames that come back from now on may keep theirs.
    ///
    /// # Errors
    /// `TimedOut`: a frame stays locked.
    pub(crate) fn give_up_all(&self) -> io::Result<()> {
        let all = FrameRange::new(Gfn(0), self.kept.parts.len() as u64 * FRAMES_PER_HUGE);
        self.kept.among(all).try_for_each(|gfn| {
            again(|| match self.give_up(gfn, |_| true) || self.kept.slot(gfn).is_none() {
                true => Ok(Served::Done),
                false => Ok(Served::Busy),
            })
        })
    }
}
