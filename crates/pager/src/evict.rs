//! Emptying frames that are in use.
//!
//! The order is the only safe one: protect, ask what is in flight, save or prove, check
//! that nobody wrote, punch. *In flight*: a request of the VMM that has pinned a page before
//! it was protected writes past the protection (`docs/decisions/0031-*`).

use std::{io, mem};

use ebb_ledger::{Content, LockedFrame, SplitError};
use ebb_store::StoreError;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::going::Going;
use crate::pager::{Grain, Pager};
use crate::unmapped::is_unmapped;

/// Held together, so that what is in flight is asked for many at once. A guest that writes
/// one of them waits no longer than it takes to save all: in one batch, but for what goes whole.
const BATCH_FRAMES: usize = 512;

/// What an eviction did, in frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Evicted {
    /// Their content is in the store now.
    pub saved: u64,
    /// A block of the guest's disk equals them: nothing was written.
    pub on_disk: u64,
    /// They hold what they held when they came from the store, where that still is: nothing was
    /// written.
    pub clean: u64,
    /// Each a single byte again and again, or free in the guest: nothing is kept.
    pub empty: u64,
    /// They were written to meanwhile; they stay.
    pub abandoned: u64,
    /// A request may be writing to them; they stay.
    pub in_flight: u64,
}

impl Evicted {
    /// The frames that the host has got.
    pub fn frames(&self) -> u64 {
        self.saved + self.on_disk + self.clean + self.empty
    }

    /// Together with another's.
    pub fn add(&mut self, other: Evicted) {
        self.saved += other.saved;
        self.on_disk += other.on_disk;
        self.clean += other.clean;
        self.empty += other.empty;
        self.abandoned += other.abandoned;
        self.in_flight += other.in_flight;
    }

    pub(crate) fn count(&mut self, content: Content, is_kept: bool) {
        match content {
            _ if is_kept => self.clean += 1,
            Content::Saved { .. } => self.saved += 1,
            Content::OnDisk { .. } => self.on_disk += 1,
            _ => self.empty += 1,
        }
    }
}

/// What is known of frames that are about to go.
pub trait Judge {
    /// The guest has freed it: nobody will ask for what it holds. Asked while
    /// the frame is protected.
    fn is_dead(&self, gfn: Gfn) -> bool;

    /// Which of these no device writes to by a request that began before they were
    /// protected. Asked while they are, and before they are read; `false` where it is not
    /// known.
    fn settled(&self, frames: &[Gfn]) -> Vec<bool>;

    /// Which of these are page cache or anonymous memory in use, by the word of the
    /// kernel that the pager believes ([`Pager::believe`]). Asked while they are protected.
    fn in_use(&self, frames: &[Gfn]) -> Vec<bool>;
}

/// Nothing is known of them, but that no device of the VMM pins any.
pub struct NothingKnown;

impl Judge for NothingKnown {
    fn is_dead(&self, _gfn: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![false; frames.len()]
    }
}

/// A frame held and protected.
pub(crate) struct Held<'l> {
    pub(crate) gfn: Gfn,
    pub(crate) word: LockedFrame<'l>,
}

impl Held<'_> {
    pub(crate) fn frame(&self) -> FrameRange {
        FrameRange::new(self.gfn, 1)
    }
}

/// Frames in order.
pub(crate) type Piece<'l> = Vec<Held<'l>>;

impl Pager {
    /// Empties those of `frames`, which are in order, that are resident. Where frames do not go one by
    /// one ([`Pager::grain_of`]) only whole huge frames go: punching a part of a large folio may
    /// zero it in place, which the guest would read as zeros.
    ///
    /// The pager must watch all of RAM ([`Pager::watch_all`]).
    ///
    /// # Errors
    /// From the store or the system calls. Frames not evicted stay resident. A store without
    /// room keeps nothing from going that needs none.
    pub fn evict(&self, frames: &[Gfn], judge: &dyn Judge) -> io::Result<Evicted> {
        self.leave_free_slots();
        let mut going = Going::new(self, judge);
        let (mut batch, mut count) = (Vec::new(), 0);
        for frames in frames.chunk_by(|a, b| a.huge() == b.huge()) {
            match self.hold(frames) {
                Ok(piece) => {
                    count += piece.as_ref().map_or(0, Vec::len);
                    batch.extend(piece);
                }
                Err(error) => {
                    self.open_all(batch.into_iter().flatten());
                    return Err(error);
                }
            }
            if count >= BATCH_FRAMES {
                count = 0;
                self.evict_batch(mem::take(&mut batch), judge, &mut going)?;
            }
        }
        self.evict_batch(batch, judge, &mut going)?;
        going.end()
    }

    /// Those go that no request in flight may be writing to.
    fn evict_batch<'l>(
        &'l self,
        batch: Vec<Piece<'l>>,
        judge: &dyn Judge,
        going: &mut Going<'_>,
    ) -> io::Result<()> {
        let frames: Vec<Gfn> = batch.iter().flatten().map(|held| held.gfn).collect();
        let mut settled = judge.settled(&frames).into_iter();
        let (mut result, mut small) = (Ok(()), Vec::new());
        for piece in batch {
            let (quiet, in_flight): (Piece<'_>, Piece<'_>) =
                piece.into_iter().partition(|_| settled.next() == Some(true));
            going.evicted.in_flight += in_flight.len() as u64;
            // Of what goes whole no part goes, where another is in flight.
            let each = quiet.iter().chain(&in_flight).map(|held| held.gfn);
            let all_or_none = !in_flight.is_empty() && self.goes_whole(each);
            self.open_all(in_flight);
            match result {
                Ok(()) if !all_or_none => {
                    match self.goes_whole(quiet.iter().map(|held| held.gfn)) {
                        true => result = going.go(quiet),
                        false => small.extend(quiet),
                    }
                }
                _ => self.open_all(quiet),
            }
        }
        // Saved at once: a device, or the guest, waits for one write to a slow disk, not for many.
        if result.is_err() {
            self.open_all(small);
            return result;
        }
        going.go(small)
    }

    /// Holds and protects frames of one huge frame: those that are resident, or all or none of those
    /// that do not go one by one.
    fn hold(&self, frames: &[Gfn]) -> io::Result<Option<Piece<'_>>> {
        let Some(huge) = frames.first().map(|gfn| gfn.huge()) else { return Ok(None) };
        match self.split(huge) {
            Ok(()) => {}
            Err(SplitError::Busy) => return Ok(None),
            Err(SplitError::NoRoom(error)) => return Err(StoreError::RunDirectory(error).into()),
        }
        let mut piece = Vec::with_capacity(frames.len());
        // What was chosen may be gone since.
        for &gfn in frames.iter().filter(|gfn| self.is_in_no_doubt(**gfn)) {
            let Ok(word) = self.ledger.lock_frame(gfn) else { continue };
            if word.content() != Content::Resident || self.pins.has(gfn) {
                self.after(word.abandon(), FrameRange::new(gfn, 1));
                continue;
            }
            piece.push(Held { gfn, word });
        }
        if let Err(error) = self.leave_large(&mut piece) {
            self.open_all(piece);
            return Err(error);
        }
        if piece.is_empty() {
            return Ok(None);
        }
        let protected =
            runs(&piece, |held| held.gfn).try_for_each(|(frames, _)| self.protect(frames));
        match protected {
            Ok(()) => Ok(Some(piece)),
            Err(error) => {
                self.open_all(piece);
                // What the VMM has mapped nowhere stays.
                if is_unmapped(&error) { Ok(None) } else { Err(error) }
            }
        }
    }

    /// Lets go of those that cannot go one by one, unless all of their huge frame is there to go.
    fn leave_large(&self, piece: &mut Piece<'_>) -> io::Result<()> {
        let gfns: Vec<Gfn> = piece.iter().map(|held| held.gfn).collect();
        let Some(grain) = gfns.first().map(|gfn| self.grain_of(gfn.huge())) else { return Ok(()) };
        if grain == Grain::Frame {
            self.split_folios(&gfns)?;
        }
        let goes_whole = |gfn| self.goes_whole([gfn]);
        let Some(large) = gfns.into_iter().find(|gfn| goes_whole(*gfn)) else { return Ok(()) };
        let all = piece.len() as u64 == FRAMES_PER_HUGE;
        if !all || (grain == Grain::Frame && !self.holds_whole_folios(large)) {
            let each = piece.drain(..);
            let (large, small): (Piece<'_>, _) = each.partition(|held| goes_whole(held.gfn));
            *piece = small;
            self.open_all(large);
        }
        Ok(())
    }

    /// Lets go of frames that stay in memory.
    pub(crate) fn open_all<'l>(&self, held: impl IntoIterator<Item = Held<'l>>) {
        for held in held {
            let frame = held.frame();
            self.report("unprotect", self.unprotect(frame));
            // A commit may have said something else.
            let wanted = held.word.unlock(Content::Resident);
            self.after(wanted, frame);
        }
    }
}

/// Runs of consecutive frames, each with the index of its first.
pub(crate) fn runs<T>(
    items: &[T],
    gfn: impl Fn(&T) -> Gfn,
) -> impl Iterator<Item = (FrameRange, usize)> {
    let mut at = 0;
    let gfns: Vec<Gfn> = items.iter().map(gfn).collect();
    std::iter::from_fn(move || {
        let first = *gfns.get(at)?;
        let start = at;
        while gfns.get(at).is_some_and(|gfn| gfn.0 == first.0 + (at - start) as u64) {
            at += 1;
        }
        Some((FrameRange::new(first, (at - start) as u64), start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_in_a_row_make_one_run() {
        let frames = [3, 4, 5, 7, 9, 10].map(Gfn);
        let found: Vec<_> = runs(&frames, |gfn| *gfn).collect();
        let run = |first, count| FrameRange::new(Gfn(first), count);
        assert_eq!(found, [(run(3, 3), 0), (run(7, 1), 3), (run(9, 2), 4)]);
    }
}
