//! Saving and emptying frames that are in use.
//!
//! The order is the only safe one: protect, hold, save, check that nobody
//! wrote, punch. *Hold*: an I/O of the VMM that began before the protection
//! writes through it; the wait is longer than such an I/O is taken to last.

use std::io;
use std::time::Duration;

use ebb_ledger::{Content, LockedFrame};
use ebb_store::Page;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::counters::add;
use crate::pager::{Grain, Pager};

/// Longer than an O_DIRECT request to a local disk (attach notes in
/// `docs/decisions/0004-evict-whole-folios.md`).
const HOLD: Duration = Duration::from_millis(10);

/// What an eviction did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Evicted {
    /// Frames whose content is in the store now.
    pub saved_frames: u64,
    /// Frames that were written to meanwhile; they stay.
    pub abandoned_frames: u64,
}

impl Pager {
    /// Saves and empties the resident frames of a range, in pieces that are
    /// whole folios of the RAM file: punching a part of a folio may zero it in
    /// place, which the guest would read as zeros. So with huge pages a range
    /// goes only as whole huge frames.
    ///
    /// The pager must watch all of RAM ([`Pager::watch_all`]). `spare` names
    /// frames to leave alone.
    ///
    /// # Errors
    /// From the store or the system calls. Frames not evicted stay resident.
    pub fn evict(&self, range: FrameRange, spare: impl Fn(Gfn) -> bool) -> io::Result<Evicted> {
        let mut evicted = Evicted::default();
        for piece in range.by_huge() {
            let whole = piece.count == FRAMES_PER_HUGE;
            let spared = || piece.frames().any(&spare);
            let done = match self.grain {
                Grain::Huge if !whole || spared() => continue,
                Grain::Huge => self.evict_piece(piece, |_| false)?,
                Grain::Frame => self.evict_piece(piece, &spare)?,
            };
            evicted.saved_frames += done.saved_frames;
            evicted.abandoned_frames += done.abandoned_frames;
        }
        Ok(evicted)
    }

    /// Gives back the space of what was saved and is not needed any more. From
    /// the thread that evicts.
    ///
    /// # Errors
    /// From the store; nothing is lost.
    pub fn trim_store(&self) -> io::Result<()> {
        Ok(self.store.trim()?)
    }

    fn evict_piece(&self, piece: FrameRange, spare: impl Fn(Gfn) -> bool) -> io::Result<Evicted> {
        let empty = self.ram.range(piece).is_none() || self.ram.is_hole(piece)?;
        if empty || self.split(piece.start.huge()).is_err() {
            return Ok(Evicted::default());
        }
        let mut held = Vec::new();
        let wanted = piece.frames().filter(|&gfn| !spare(gfn));
        let result = { wanted }.try_for_each(|gfn| {
            held.extend(self.hold(gfn)?.map(|frame| (gfn, frame)));
            Ok(())
        });
        let all = held.len() as u64 == FRAMES_PER_HUGE;
        if result.is_err() || held.is_empty() || (self.grain == Grain::Huge && !all) {
            held.into_iter().for_each(|(gfn, frame)| self.open(gfn, frame));
            return result.map(|()| Evicted::default());
        }
        std::thread::sleep(HOLD);
        self.save_and_punch(held)
    }

    /// Takes and protects a frame that is resident and there.
    fn hold(&self, gfn: Gfn) -> io::Result<Option<LockedFrame<'_>>> {
        let frame = FrameRange::new(gfn, 1);
        let Ok(held) = self.ledger.lock_frame(gfn) else { return Ok(None) };
        let there = self.grain == Grain::Huge || matches!(self.ram.is_hole(frame), Ok(false));
        if held.content() != Content::Resident || !there {
            let wanted = held.abandon();
            self.after(wanted, frame);
            return Ok(None);
        }
        match self.protect(frame) {
            Ok(()) => Ok(Some(held)),
            Err(error) => {
                self.open(gfn, held);
                Err(error)
            }
        }
    }

    /// Lets go of a frame that stays as it is.
    fn open(&self, gfn: Gfn, held: LockedFrame<'_>) {
        let frame = FrameRange::new(gfn, 1);
        self.report("unprotect", self.unprotect(frame));
        let wanted = held.unlock(Content::Resident);
        self.after(wanted, frame);
    }

    fn save_and_punch(&self, held: Vec<(Gfn, LockedFrame<'_>)>) -> io::Result<Evicted> {
        let mut evicted = Evicted::default();
        let mut result = Ok(());
        let mut saved: Vec<(Gfn, LockedFrame<'_>, u64)> = Vec::new();
        let mut open: Vec<(Gfn, LockedFrame<'_>)> = Vec::new();
        for (gfn, mut frame) in held {
            let slot = if result.is_ok() { self.save(gfn) } else { Ok(None) };
            match slot {
                Ok(Some(slot)) if frame.commit(Content::Saved { slot }) => {
                    saved.push((gfn, frame, slot));
                }
                Ok(slot) => {
                    evicted.abandoned_frames += u64::from(slot.is_some());
                    slot.into_iter().for_each(|slot| self.release(slot));
                    open.push((gfn, frame));
                }
                Err(error) => {
                    result = Err(error);
                    open.push((gfn, frame));
                }
            }
        }
        if self.grain == Grain::Huge && !open.is_empty() {
            self.take_back(saved);
            open.into_iter().for_each(|(gfn, frame)| self.open(gfn, frame));
            return result.map(|()| Evicted { saved_frames: 0, ..evicted });
        }
        open.into_iter().for_each(|(gfn, frame)| self.open(gfn, frame));
        evicted.saved_frames = saved.len() as u64;
        self.punch_saved(saved)?;
        result.map(|()| evicted)
    }

    /// A huge frame goes whole or not at all.
    fn take_back(&self, saved: Vec<(Gfn, LockedFrame<'_>, u64)>) {
        for (gfn, frame, slot) in saved {
            self.open(gfn, frame);
            self.release(slot);
        }
    }

    fn punch_saved(&self, mut saved: Vec<(Gfn, LockedFrame<'_>, u64)>) -> io::Result<()> {
        let mut result = Ok(());
        let mut punched = 0;
        for run in saved.chunk_by(|a, b| a.0.0 + 1 == b.0.0) {
            let frames = FrameRange::new(run[0].0, run.len() as u64);
            self.devices.unmap(frames);
            result = self.ram.punch(frames);
            if result.is_err() {
                break;
            }
            punched += run.len();
        }
        // Not punched is as good as before: the page in the file wins.
        self.take_back(saved.split_off(punched));
        for (gfn, frame, slot) in saved {
            let wanted = frame.unlock(Content::Saved { slot });
            self.after(wanted, FrameRange::new(gfn, 1));
            add(&self.counters.saved_frames, 1);
        }
        result
    }

    fn save(&self, gfn: Gfn) -> io::Result<Option<u64>> {
        let mut page: Page = [0; FRAME_BYTES as usize];
        self.ram.read(FrameRange::new(gfn, 1), &mut page)?;
        Ok(Some(self.store.save(&page)?))
    }

    pub(crate) fn release(&self, slot: u64) {
        self.store.release(slot);
    }
}
