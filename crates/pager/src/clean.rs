//! Frames that came back and were not written since: they keep their slot in the store,
//! so that they can go again without being saved again.
//!
//! A clean frame is write-protected; the first write to it gives its slot up. The
//! protection is the only proof, so it and the slot end together, under the word's lock.
//! Whoever writes through another mapping than the VMM's ends it before
//! ([`Pager::pin`]); after a daemon's death a clean frame counts as resident.

use std::io;

use ebb_ledger::{Content, LockedFrame};
use ebb_units::{FrameRange, Gfn};

use crate::counters::{add, subtract};
use crate::install::Served;
use crate::pager::Pager;

impl Pager {
    /// As the holder of a frame that was just filled from `slot`, protected: it is clean
    /// from now on. Whether somebody asked for it meanwhile.
    pub(crate) fn arrive_clean(&self, word: LockedFrame<'_>, slot: u64) -> bool {
        subtract(&self.counters.saved_frames, 1);
        add(&self.counters.clean_frames, 1);
        word.unlock(Content::Clean { slot })
    }

    /// As the holder of a frame that stays in memory and is protected no more: a clean one
    /// gives its slot up. Whether somebody asked for it meanwhile.
    pub(crate) fn stay(&self, word: LockedFrame<'_>) -> bool {
        let content = word.content();
        let wanted = word.unlock(Content::Resident);
        // After the word, so that none names a slot that another page is put into.
        if let Content::Clean { slot } = content {
            self.store.release(slot);
            subtract(&self.counters.clean_frames, 1);
        }
        wanted
    }

    /// A clean frame is plain memory from now on: it is written, or about to be.
    pub(crate) fn end_clean(&self, gfn: Gfn) -> io::Result<Served> {
        let Ok(held) = self.ledger.lock_frame(gfn) else { return Ok(Served::Busy) };
        let frame = FrameRange::new(gfn, 1);
        if !is_clean(held.content()) {
            self.after(held.abandon(), frame);
            return Ok(Served::Busy);
        }
        if let Err(error) = self.unprotect(frame) {
            self.after(held.abandon(), frame);
            return Err(error);
        }
        let wanted = self.stay(held);
        self.after(wanted, frame);
        Ok(Served::Done)
    }

    /// Ends it for those of these frames of one huge frame that are clean. Tried once each:
    /// one that somebody holds may stay so.
    pub(crate) fn end_clean_in(&self, frames: FrameRange) -> io::Result<()> {
        if !self.ledger.is_split(frames.start.huge()) {
            // A whole one is never clean.
            return Ok(());
        }
        let mut clean = frames.frames().filter(|&gfn| is_clean(self.ledger.content(gfn)));
        clean.try_for_each(|gfn| self.end_clean(gfn).map(drop))
    }

    /// A missing page of a frame that is on record as clean: it came meanwhile, or was
    /// punched by the VMM, as a balloon does; that is a hole like any other.
    pub(crate) fn touch_clean(&self, gfn: Gfn) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        match self.ram.is_hole(frame)? {
            // Its word says so the next time.
            true => self.end_clean(gfn).map(|_| Served::Busy),
            false => self.wake(frame).map(|()| Served::Done),
        }
    }

    /// Gives up the slots of at most so many clean frames. Returns how many frames that were.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn give_up_clean(&self, most: usize) -> io::Result<usize> {
        self.give_up_clean_in(most, |_| true)
    }

    /// The same, of the runs that are `wanted`.
    pub(crate) fn give_up_clean_in(
        &self,
        most: usize,
        wanted: impl Fn(FrameRange) -> bool,
    ) -> io::Result<usize> {
        let clean = self.ledger.runs().filter(|(run, content)| is_clean(*content) && wanted(*run));
        let frames: Vec<Gfn> = clean.flat_map(|(run, _)| run.frames()).take(most).collect();
        let end = |gfn| match self.ledger.content(gfn) {
            Content::Clean { .. } => self.end_clean(gfn),
            _ => Ok(Served::Done),
        };
        frames.iter().try_for_each(|&gfn| self.again(|| end(gfn)))?;
        Ok(frames.len())
    }
}

pub(crate) fn is_clean(content: Content) -> bool {
    matches!(content, Content::Clean { .. })
}
