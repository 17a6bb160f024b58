//! Moving pages from the store's memory to its disk: those that have been there longest make room.

use std::io;

use ebb_ledger::{Content, LockedFrame};
use ebb_store::{Page, PageBuffer};
use ebb_units::{FrameRange, Gfn};

use crate::evict::Evictor;
use crate::support::counters::add;
/// Kept slots that are given up at once: 32 MiB.
const AT_ONCE: usize = 8192;

/// A page that moves.
struct Moving<'l> {
    gfn: Gfn,
    word: LockedFrame<'l>,
    from: u64,
}

impl Evictor {
    /// Moves pages from the store's memory to its disk, if the store is short of memory: some
    /// hundred at a time. Returns how many were moved; 0: nothing is to be done. Called by the
    /// thread that evicts.
    ///
    /// # Errors
    /// From the store; pages that were not moved stay where they were.
    pub fn write_back(&self) -> io::Result<u64> {
        let surplus = self.residency.store().surplus();
        if surplus.is_empty() {
            return Ok(0);
        }
        let mut pages = PageBuffer::new(surplus.len());
        let mut moving = Vec::with_capacity(surplus.len());
        for slot in surplus {
            let Some(next) = self.owner_of(slot) else { continue };
            let loaded = pages.pages_mut().get_mut(moving.len());
            match loaded.map(|page| self.residency.store().load(slot, page)) {
                Some(Ok(())) => moving.push(next),
                _ => self.frames.after(next.word.abandon(), FrameRange::new(next.gfn, 1)),
            }
        }
        let save = |pages: &[Page]| self.residency.store().save_to_disk(pages);
        let batch = self.with_room(&pages.pages()[..moving.len()], save);
        let moved = batch.slots.iter().flatten().count() as u64;
        for ((frame, page), to) in moving.into_iter().zip(pages.pages()).zip(batch.slots) {
            self.land(frame, page, to);
        }
        add(&self.frames.counters().written_back_frames, moved);
        batch.error.map_or(Ok(moved), |error| Err(error.into()))
    }

    /// Returns the frame whose page is in a slot, locked.
    fn owner_of(&self, slot: u64) -> Option<Moving<'_>> {
        let gfn = self.residency.owners().get(slot)?;
        let word = self.frames.ledger().lock_frame(gfn).ok()?;
        if word.content() == (Content::Saved { slot }) {
            return Some(Moving { gfn, word, from: slot });
        }
        self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
        None
    }

    /// Ends the move of a page, which is in slot `to`, too: the word says so, and then the old slot
    /// is freed. In this order, a daemon that dies leaves a word that names a page.
    fn land(&self, Moving { gfn, word, from }: Moving<'_>, page: &Page, to: Option<u64>) {
        let wanted = match to {
            Some(slot) => {
                self.residency.owners().set(slot, gfn);
                self.residency.kept().note(gfn, slot, self.residency.digest_key().digest(page));
                let wanted = word.unlock(Content::Saved { slot });
                self.residency.store().release(from);
                wanted
            }
            None => word.abandon(),
        };
        self.frames.after(wanted, FrameRange::new(gfn, 1));
    }

    /// Gives back the store's space that is not needed any more. If other VMs are short of it, or
    /// nothing is to be evicted (`is_idle`), also gives up some kept slots. Called by the thread
    /// that evicts.
    ///
    /// # Errors
    /// From the store; nothing is lost.
    pub fn trim_store(&self, is_idle: bool) -> io::Result<()> {
        if self.residency.store().is_room_wanted() || is_idle {
            self.residency.give_up_kept(AT_ONCE);
        }
        Ok(self.residency.store().trim()?)
    }
}
