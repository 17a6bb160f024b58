//! Room in the store for what is evicted: frames that keep a slot without need give it up.

use std::sync::atomic::Ordering::Relaxed;

use ebb_store::{Page, PageBuffer, SavedBatch};

use crate::evict::Evictor;

/// Of the store's slots that no word names, one in so many is kept by no frame, so that written
/// pages find room in consecutive slots.
const FREE_PART: u64 = 8;
/// Most attempts to make room by giving up kept slots, when a store has no room for pages.
const ROOM_ATTEMPTS: usize = 4;

impl Evictor {
    /// Gives up kept slots until enough slots are free. Called before frames that may be saved are
    /// locked.
    pub(crate) fn leave_free_slots(&self) {
        let usage = self.residency.store_usage();
        let kept = self.frames.counters().clean_frames.load(Relaxed);
        let free = usage.disk_slots.saturating_sub(usage.disk_slots_used);
        self.residency.give_up_kept(((free + kept) / FREE_PART).saturating_sub(free) as usize);
    }

    /// Saves pages; if there is no room for all of them, gives up kept slots and saves the rest
    /// there.
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
            // Frames that keep a slot without need make room for those that need one.
            if !is_short || self.residency.give_up_kept(rest.len()) == 0 {
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
}
