//! Slots that frames keep are dropped, given up, or used again.

use super::kept::WORD_SLOTS;
use crate::frames::words::{Served, again};
use crate::residency::Residency;
use crate::support::counters::{add, subtract};
use ebb_store::{MEMORY_SLOTS, Page, PageBuffer, SavedBatch};
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// So much of the store's slots that no word names is kept by no frame: pages that are written find
/// room in a row.
const FREE_PART: u64 = 8;
/// Slots that frames keep are asked for so often, where a store has no room for pages.
const ROOM_ATTEMPTS: usize = 4;

impl Residency {
    /// As the holder of a frame's word, which names no slot: the frame keeps none any more.
    pub(crate) fn drop_slot(&self, gfn: Gfn) -> bool {
        let Some(slot) = self.kept.slot(gfn) else { return false };
        self.kept.clear(gfn);
        self.kept.mark(slot, false);
        self.store.release(slot);
        subtract(&self.frames.counters().clean_frames, 1);
        true
    }

    /// The same of many, as the holder of their words.
    pub(crate) fn drop_slots(&self, frames: FrameRange) {
        for gfn in self.kept.among(frames) {
            self.drop_slot(gfn);
        }
    }

    /// As the holder of a frame that was just filled from a slot of the store: whether it keeps it.
    pub(crate) fn keep_slot(&self, gfn: Gfn, slot: u64) -> bool {
        let keeps = slot < MEMORY_SLOTS && self.kept.keep(gfn, slot);
        add(&self.frames.counters().clean_frames, u64::from(keeps));
        keeps
    }

    /// Whether the frame keeps a slot: unless it was changed since, it goes without a write.
    pub fn keeps_slot(&self, gfn: Gfn) -> bool {
        self.kept.slot(gfn).is_some()
    }

    /// Gives up at most so many slots that frames keep: in the order of the slots, from where the
    /// last call ended, so that those go first that were written first, and what becomes free lies
    /// together. Returns how many those were: fewer only if there are no more, but for frames that
    /// somebody holds.
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

    /// Before frames are held that may be saved.
    pub(crate) fn leave_free_slots(&self) {
        let (usage, kept) = (self.store.usage(), self.frames.counters().clean_frames.load(Relaxed));
        let free = usage.disk_slots.saturating_sub(usage.disk_slots_used);
        self.give_up_kept(((free + kept) / FREE_PART).saturating_sub(free) as usize);
    }

    /// Has pages saved; where there is no room for all of them, in slots that frames only keep.
    pub(crate) fn with_room(
        &self,
        pages: &[Page],
        save: impl Fn(&[Page]) -> SavedBatch,
    ) -> SavedBatch {
        let mut batch = save(pages);
        for _ in 0..ROOM_ATTEMPTS {
            let rest: Vec<usize> =
                (0..pages.len()).filter(|at| batch.slots[*at].is_none()).collect();
            let is_short = batch.error.as_ref().is_some_and(|error| error.is_no_room());
            // Who has a slot without need makes room for who needs one.
            if !is_short || self.give_up_kept(rest.len()) == 0 {
                break;
            }
            let mut to_save = PageBuffer::new(rest.len());
            to_save.pages_mut().iter_mut().zip(&rest).for_each(|(to, at)| *to = pages[*at]);
            let more = save(to_save.pages());
            rest.iter().zip(more.slots).for_each(|(at, slot)| batch.slots[*at] = slot);
            batch.error = more.error;
        }
        batch
    }

    /// Those of the frames that nobody holds keep none any more.
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
        // Another by now, or none.
        let given = self.kept.slot(gfn).is_some_and(wanted) && self.drop_slot(gfn);
        self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
        given
    }

    /// Nobody keeps a slot any more, but what comes back from now on.
    ///
    /// # Errors
    /// `TimedOut`: somebody holds a frame and does not let go.
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
