//! Frames that a device of ours uses right now: they stay where they are.
//!
//! The device pins, then looks at the frame's word; whoever evicts locks the word,
//! then looks at the pins. With a fence between the two on both sides at least one
//! of them sees the other: who evicts lets go, the device waits and looks again.

use std::io;
use std::sync::atomic::Ordering::{AcqRel, SeqCst};
use std::sync::atomic::fence;

use ebb_ledger::Content;
use ebb_units::{FrameRange, Gfn, HugeFrame};

use crate::counters::add;
use crate::dead::Verdict;
use crate::give_back::{ATTEMPTS, SOON_ATTEMPTS};
use crate::install::Served;
use crate::pager::{Grain, Pager};
use crate::sparse::Sparse;

/// How many requests use each frame.
pub(crate) struct Pins(Sparse);

impl Pins {
    pub(crate) fn new(frames: u64) -> Pins {
        Pins(Sparse::new(frames))
    }

    pub(crate) fn pin(&self, gfn: Gfn) {
        if let Some(pins) = self.0.make(gfn.0) {
            pins.fetch_add(1, AcqRel);
        }
        fence(SeqCst);
    }

    pub(crate) fn unpin(&self, gfn: Gfn) {
        if let Some(pins) = self.0.get(gfn.0) {
            pins.fetch_sub(1, AcqRel);
        }
    }

    /// As the holder of the frame's word.
    pub(crate) fn has(&self, gfn: Gfn) -> bool {
        self.has_any(FrameRange::new(gfn, 1))
    }

    /// As whoever has made sure that no more come unseen.
    pub(crate) fn has_any(&self, frames: FrameRange) -> bool {
        fence(SeqCst);
        self.0.has_any(frames.start.0, frames.count)
    }
}

impl Pager {
    /// Has these frames in memory, and there they stay until [`Pager::unpin`]. With
    /// `replace` the caller writes every byte of them, and an old content that is
    /// elsewhere is not read.
    ///
    /// # Errors
    /// A frame cannot be brought back; nothing is pinned then.
    pub fn pin(&self, frames: FrameRange, replace: bool) -> io::Result<()> {
        self.pin_for(ATTEMPTS, frames, replace)
    }

    /// The same for a device that asks again for as long as it takes: it waits some milliseconds at
    /// most for whoever holds a frame, as a slow swap disk can hold one for any time.
    ///
    /// # Errors
    /// `PermissionDenied`: no device may use a frame. Any other: it cannot be had now. Nothing is
    /// pinned then.
    pub fn pin_soon(&self, frames: FrameRange, replace: bool) -> io::Result<()> {
        self.pin_for(SOON_ATTEMPTS, frames, replace)
    }

    fn pin_for(&self, attempts: usize, frames: FrameRange, replace: bool) -> io::Result<()> {
        frames.frames().for_each(|gfn| self.pins.pin(gfn));
        let settle = |gfn| self.again_for(attempts, || self.settle_pin(gfn, replace));
        let there = frames.frames().try_for_each(settle);
        let there = there.and_then(|()| self.fill_holes(attempts, frames, replace));
        if there.is_err() {
            self.unpin(frames);
        }
        there
    }

    /// Ends one [`Pager::pin`] of the same frames.
    pub fn unpin(&self, frames: FrameRange) {
        frames.frames().for_each(|gfn| self.pins.unpin(gfn));
    }

    fn settle_pin(&self, gfn: Gfn, replace: bool) -> io::Result<Served> {
        match self.ledger.unlocked(gfn) {
            None => Ok(Served::Busy),
            Some(Content::Resident) => Ok(Served::Done),
            Some(Content::Guarded) => Err(io::ErrorKind::PermissionDenied.into()),
            Some(Content::Watch { head, order }) => self.restore(gfn, head, order),
            Some(Content::Saved { .. } | Content::OnDisk { .. }) => self.pin_back(gfn, replace),
            Some(content) => self.install(gfn, content),
        }
    }

    /// Gives holes that are resident on record their memory before the device does it by its own
    /// access: that could bring a huge page, whose zeros would win over what is elsewhere of it.
    fn fill_holes(&self, attempts: usize, frames: FrameRange, replace: bool) -> io::Result<()> {
        let fill = |gfn| self.again_for(attempts, || self.fill_hole(gfn, replace));
        for part in frames.by_huge() {
            // Of a huge frame whose one word says that all of it is resident nothing is elsewhere.
            let huge = part.start.huge();
            let whole = self.grain_of(huge) == Grain::Huge && !self.ledger.is_split(huge);
            let Some(part) = self.ram.clip(part).filter(|_| !whole) else { continue };
            if !self.ram.is_full(part)? {
                part.frames().try_for_each(fill)?;
            }
        }
        Ok(())
    }

    fn fill_hole(&self, gfn: Gfn, replace: bool) -> io::Result<Served> {
        let frame = FrameRange::new(gfn, 1);
        if !self.ram.is_hole(frame)? {
            return Ok(Served::Done);
        }
        let Some(held) = self.hold_word_of(gfn) else { return Ok(Served::Busy) };
        let words = held.frames();
        if held.contents().any(|(_, content)| content != Content::Resident) {
            self.after(held.abandon(), words);
            return self.settle_pin(gfn, replace).map(|_| Served::Busy);
        }
        self.devices.lost(frame);
        let filled = match self.grain_of(gfn.huge()) {
            // Our own mapping has no huge pages.
            Grain::Frame => self.ram.populate(frame),
            Grain::Huge if self.is_mixed(gfn.huge()) => self.fill(gfn, 0),
            Grain::Huge => Ok(()),
        };
        self.after(held.abandon(), words);
        // Who touched it waits for it, too.
        filled.and_then(|()| self.wake(frame)).map(|()| Served::Done)
    }

    /// Whether parts of a huge frame are elsewhere or empty. Then all of RAM is watched, and
    /// since evictions take no huge frame with a pin in it, only what is there now can be.
    fn is_mixed(&self, huge: HugeFrame) -> bool {
        let there = |content| matches!(content, Content::Resident | Content::Watch { .. });
        FrameRange::huge(huge).frames().any(|gfn| !there(self.ledger.content(gfn)))
    }

    /// A frame that is elsewhere comes back; unread, if what it held is not needed.
    fn pin_back(&self, gfn: Gfn, replace: bool) -> io::Result<Served> {
        let Ok(held) = self.ledger.lock_frame(gfn) else { return Ok(Served::Busy) };
        let counters = &self.counters;
        let (elsewhere, blank) = match held.content().is_elsewhere() {
            false => (false, None),
            true if replace => (true, Some(&counters.replaced_frames)),
            true => {
                let dead = self.verdict(gfn) == Verdict::Dead;
                (true, dead.then_some(&counters.false_reads_avoided))
            }
        };
        if let Some(counter) = blank {
            return self.install_blank(gfn, held).inspect(|_| add(counter, 1));
        }
        self.after(held.abandon(), FrameRange::new(gfn, 1));
        if elsewhere { self.install_backed(gfn) } else { Ok(Served::Busy) }
    }
}
