//! Locking frames that are in use, and evicting those that can be evicted.

use super::{Evictor, Piece, ProtectedFrame};
use crate::evict::evicted::Evicted;
use crate::evict::eviction::Eviction;
use crate::folios::Grain;
use crate::frames::errors::is_unmapped;
use crate::residency::judge::Judge;
use crate::support::counters::add;
use ebb_ledger::{Content, SplitError};
use ebb_store::StoreError;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};
use std::io;
use std::mem;

/// Number of frames that are locked together, so that one question asks what is in flight for many.
/// A guest that writes to one of them waits no longer than it takes to save all: in one batch,
/// except what is evicted whole.
const BATCH_FRAMES: usize = 512;

impl Evictor {
    /// Evicts those of `frames`, which are in order, that are resident. Where frames are not
    /// evicted one by one ([`crate::FolioMap::grain_of`]) only whole huge frames are: punching a
    /// part of a large folio may zero it in place, and the guest would read the zeros.
    ///
    /// The pager must watch all of RAM ([`crate::Frames::watch_all`]).
    ///
    /// # Errors
    /// From the store or the system calls. Frames that were not evicted stay resident. A store
    /// without room does not keep frames from eviction that need none.
    pub fn evict(&self, frames: &[Gfn], judge: &dyn Judge) -> io::Result<Evicted> {
        debug_assert!(frames.is_sorted());
        self.leave_free_slots();
        let mut eviction = Eviction::new(self, judge);
        let (mut batch, mut count) = (Vec::new(), 0);
        for frames in frames.chunk_by(|a, b| a.huge() == b.huge()) {
            match self.lock_and_protect(frames) {
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
                self.evict_batch(mem::take(&mut batch), judge, &mut eviction)?;
            }
        }
        self.evict_batch(batch, judge, &mut eviction)?;
        eviction.end()
    }

    /// Evicts those frames of a batch that no request in flight may be writing to.
    fn evict_batch<'l>(
        &'l self,
        batch: Vec<Piece<'l>>,
        judge: &dyn Judge,
        eviction: &mut Eviction<'_>,
    ) -> io::Result<()> {
        add(&self.frames.counters().worker_batches, 1);
        let frames: Vec<Gfn> = batch.iter().flatten().map(|held| held.gfn).collect();
        let mut settled = judge.settled(&frames).into_iter();
        let (mut result, mut small) = (Ok(()), Vec::new());
        for piece in batch {
            let (quiet, in_flight): (Piece<'_>, Piece<'_>) =
                piece.into_iter().partition(|_| settled.next() == Some(true));
            eviction.evicted.in_flight += in_flight.len() as u64;
            // Of frames that are evicted whole, none is evicted while one has a request in flight.
            let each = quiet.iter().chain(&in_flight).map(|held| held.gfn);
            let all_or_none = !in_flight.is_empty() && self.folios.goes_whole(each);
            self.open_all(in_flight);
            match result {
                Ok(()) if !all_or_none => {
                    match self.folios.goes_whole(quiet.iter().map(|held| held.gfn)) {
                        true => result = eviction.evict(quiet),
                        false => small.extend(quiet),
                    }
                }
                _ => self.open_all(quiet),
            }
        }
        // Saved in one call: a device, or the guest, waits for one write to a slow disk, not for
        // many.
        if result.is_err() {
            self.open_all(small);
            return result;
        }
        eviction.evict(small)
    }

    /// Locks and protects frames of one huge frame: those that are resident. Of frames that are not
    /// evicted one by one: all or none.
    fn lock_and_protect(&self, frames: &[Gfn]) -> io::Result<Option<Piece<'_>>> {
        let Some(huge) = frames.first().map(|gfn| gfn.huge()) else { return Ok(None) };
        match self.frames.split(huge) {
            Ok(()) => {}
            Err(SplitError::Busy) => return Ok(None),
            Err(SplitError::NoRoom(error)) => return Err(StoreError::RunDirectory(error).into()),
        }
        let mut piece = Vec::with_capacity(frames.len());
        // A chosen frame may have been unplugged since.
        let may_go = |gfn: &&Gfn| self.frames.doubted().may_go(self.frames.ram(), **gfn);
        for &gfn in frames.iter().filter(may_go) {
            let Ok(word) = self.frames.ledger().lock_frame(gfn) else { continue };
            if word.content() != Content::Resident || self.frames.pins().has(gfn) {
                self.frames.after(word.abandon(), FrameRange::new(gfn, 1));
                continue;
            }
            piece.push(ProtectedFrame { gfn, word });
        }
        if let Err(error) = self.leave_large(&mut piece) {
            self.open_all(piece);
            return Err(error);
        }
        if piece.is_empty() {
            return Ok(None);
        }
        let protected = self
            .runs(&piece, |held| held.gfn)
            .try_for_each(|(frames, _)| self.frames.protect(frames));
        match protected {
            Ok(()) => Ok(Some(piece)),
            Err(error) => {
                self.open_all(piece);
                // Memory that the VMM maps nowhere stays.
                if is_unmapped(&error) { Ok(None) } else { Err(error) }
            }
        }
    }

    /// Unlocks frames that cannot be evicted one by one, unless all of their huge frame is there to
    /// be evicted. Where large folios reach into the next huge frame, they stay: to evict a part of
    /// one zeroes it in place, and the next touch of the neighbour would bring zeros for it.
    fn leave_large(&self, piece: &mut Piece<'_>) -> io::Result<()> {
        let gfns: Vec<Gfn> = piece.iter().map(|held| held.gfn).collect();
        let Some(grain) = gfns.first().map(|gfn| self.folios.grain_of(gfn.huge())) else {
            return Ok(());
        };
        if grain == Grain::Frame {
            self.folios.split_folios(&gfns)?;
        }
        let goes_whole = |gfn| self.folios.goes_whole([gfn]);
        let Some(large) = gfns.into_iter().find(|gfn| goes_whole(*gfn)) else { return Ok(()) };
        let all = piece.len() as u64 == FRAMES_PER_HUGE;
        if !all || !self.folios.holds_whole_folios(large) {
            let each = piece.drain(..);
            let (large, small): (Piece<'_>, _) = each.partition(|held| goes_whole(held.gfn));
            *piece = small;
            self.open_all(large);
        }
        Ok(())
    }
}
