//! Bringing everything back: before the VM is let go, and when its guest was
//! reset.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ebb_ledger::Content;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::Region;

use crate::counters::{Counters, subtract};
use crate::install::Served;
use crate::pager::Pager;

/// A word that its holder does not let go of in so many looks is an error.
pub(crate) const ATTEMPTS: usize = 50_000;
/// After so many, with a pause: an eviction holds its words for some 10 ms.
const EAGER_ATTEMPTS: usize = 100;
const PAUSE: Duration = Duration::from_micros(100);
/// Some milliseconds: for a device that asks again by itself ([`Pager::pin_soon`]).
pub(crate) const SOON_ATTEMPTS: usize = EAGER_ATTEMPTS + 10;
/// Where so many frames in a row fail, what fails is not theirs: the swap file, or the host.
const FAILURES_MAX: u32 = 256;
/// One that takes seconds counts as so many.
const SLOW_FAILURE: u32 = 64;

impl Pager {
    /// Brings every emptied frame back and ends every watch. Returns the bytes
    /// brought back. Faults are served meanwhile.
    ///
    /// # Errors
    /// `ENOMEM`: the host has not enough memory; what is not back stays on
    /// record and is served on touch.
    pub fn give_back_all(&self) -> io::Result<u64> {
        self.folios.forget();
        let Counters { emptied_frames, saved_frames, on_disk_frames, .. } = &self.counters;
        let counters = [emptied_frames, saved_frames, on_disk_frames];
        let before: u64 = counters.iter().map(|counter| counter.load(Relaxed)).sum();
        // The watches first: each brings its block back before its devices.
        for (frames, content) in self.off_record() {
            if let Content::Watch { .. } = content {
                for metadata in frames.frames() {
                    let back = self.again(|| self.restore_watched(metadata));
                    self.or_wake(back)?;
                }
            }
        }
        self.or_wake(self.give_back_each(1, |_, _| true))?;
        // Last: until now what came back has kept its slot.
        self.give_up_all()?;
        Ok(before * FRAME_BYTES)
    }

    /// Brings back the frames whose content is elsewhere, for processes that map the memory
    /// without us: what stays away is free in the guest, or reads as the zeros that it was. Returns
    /// the bytes brought back. Faults are served meanwhile.
    ///
    /// # Errors
    /// As [`Pager::give_back_all`].
    pub fn give_back_in_use(&self) -> io::Result<u64> {
        self.folios.forget();
        let Counters { saved_frames, on_disk_frames, .. } = &self.counters;
        let before = saved_frames.load(Relaxed) + on_disk_frames.load(Relaxed);
        let reads_as_zero = |content| matches!(content, Content::Empty { fill: 0, .. });
        self.or_wake(self.give_back_each(1, |_, content| !reads_as_zero(content)))?;
        Ok(before * FRAME_BYTES)
    }

    /// Brings back what is in use of memory that the VMM has mapped nowhere ([`Pager::unmapped`]), so
    /// that it is there if the VMM maps it again, which nobody is told of; and what is in use of the
    /// `doubted` files, which it may have mapped again already, where nobody watches it. A frame that
    /// fails keeps no other from coming back. Until this has worked nothing of `doubted` is evicted.
    ///
    /// # Errors
    /// As [`Pager::give_back_all`], of the first frame that failed, and as [`Pager::unmapped`].
    pub fn give_back_unmapped(&self, doubted: &[usize]) -> io::Result<()> {
        self.doubt(doubted);
        let mut unmapped = self.unmapped()?;
        let doubted = self.ram.regions().filter(|region| doubted.contains(&region.file));
        unmapped.extend(doubted.map(Region::frames));
        if unmapped.is_empty() {
            self.doubt(&[]);
            return Ok(());
        }
        let is_unmapped = |frames: FrameRange| {
            unmapped.iter().any(|away| away.start < frames.end() && frames.start < away.end())
        };
        let reads_as_zero = |content| matches!(content, Content::Empty { fill: 0, .. });
        self.give_back_each(FAILURES_MAX, |frames, content| {
            is_unmapped(frames) && !reads_as_zero(content)
        })?;
        self.doubt(&[]);
        Ok(())
    }

    /// Who asked for a frame whose holder failed was not told.
    fn or_wake(&self, result: io::Result<()>) -> io::Result<()> {
        if result.is_err() {
            self.wake_all()?;
        }
        result
    }

    /// Goes on where a frame fails, until so many have failed in a row.
    fn give_back_each(
        &self,
        failures_max: u32,
        wanted: impl Fn(FrameRange, Content) -> bool,
    ) -> io::Result<()> {
        let (mut first, mut in_a_row) = (None, 0);
        let each = self.off_record().into_iter();
        for (frames, content) in each.filter(|(frames, content)| wanted(*frames, *content)) {
            let count = match content {
                Content::Empty { .. } => frames.count,
                Content::Saved { .. } | Content::OnDisk { .. } => 1,
                _ => continue,
            };
            for start in (frames.start.0..frames.end().0).step_by(count as usize) {
                let part = FrameRange::new(Gfn(start), count);
                let Err(error) = self.give_back_part(part, content) else {
                    in_a_row = 0;
                    continue;
                };
                in_a_row += if error.kind() == io::ErrorKind::TimedOut { SLOW_FAILURE } else { 1 };
                let first = first.get_or_insert(error);
                if in_a_row >= failures_max {
                    return Err(std::mem::replace(first, io::ErrorKind::Other.into()));
                }
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Frames that are empty in one, or one that is saved.
    fn give_back_part(&self, part: FrameRange, content: Content) -> io::Result<()> {
        match content {
            Content::Empty { .. } => self.again(|| self.give_back(part)),
            _ => self.again(|| self.bring_back(part.start)),
        }
    }

    /// After a restart: a block that a dead daemon was working on comes back,
    /// since nobody knows whether its metadata is still protected.
    ///
    /// # Errors
    /// As [`Pager::give_back_all`].
    pub fn settle_watch(&self, metadata: Gfn) -> io::Result<()> {
        self.again(|| self.restore_watched(metadata))
    }

    /// Ends the watches without bringing their blocks back: for a VM in
    /// release mode, whose daemon died while it emptied them.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn end_watches(&self) -> io::Result<()> {
        for (frames, content) in self.off_record() {
            if matches!(content, Content::Watch { .. }) {
                { frames.frames() }
                    .try_for_each(|metadata| self.again(|| self.end_watch(metadata, content)))?;
            }
        }
        Ok(())
    }

    /// After a restart: a frame on record as elsewhere whose page is there was not
    /// punched yet, or was brought back already. The page wins. One that is clean, by the word of a
    /// daemon of an older version, is protected until now; its slot nobody has claimed.
    ///
    /// # Errors
    /// As lseek(2) and ioctl_userfaultfd(2).
    pub fn settle(&self) -> io::Result<()> {
        for (frames, content) in self.off_record() {
            let there = match content {
                Content::Watch { .. } | Content::Guarded => false,
                Content::Clean { .. } => true,
                // Nobody can tell: what was held was seen to (`Pager::settle_held`).
                Content::Empty { .. } if !self.ram.knows_holes(frames) => false,
                _ => !self.ram.is_hole(frames)?,
            };
            if there {
                frames.frames().try_for_each(|gfn| self.settle_frame(gfn, content))?;
            }
        }
        Ok(())
    }

    fn settle_frame(&self, gfn: Gfn, content: Content) -> io::Result<()> {
        let frame = FrameRange::new(gfn, 1);
        let is_clean = matches!(content, Content::Clean { .. });
        let hole = !is_clean && self.ram.is_hole(frame)?;
        if hole || self.split(gfn.huge()).is_err() {
            return Ok(());
        }
        let Ok(held) = self.ledger.lock_frame(gfn) else { return Ok(()) };
        let open = self.unprotect_if_watched(frame);
        if let Content::Empty { .. } = held.content() {
            subtract(&self.counters.emptied_frames, 1);
        }
        self.devices.map(frame);
        let wanted = self.arrive(gfn, held);
        self.after(wanted, frame);
        open
    }

    /// What is not watched was not protected either.
    pub(crate) fn unprotect_if_watched(&self, frames: FrameRange) -> io::Result<()> {
        self.unprotect(frames).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => Ok(()),
            _ => Err(error),
        })
    }

    /// Ends a watch, if the frame is that one still: what is protected for something else, as
    /// another block's metadata is, stays so.
    pub(crate) fn end_watch(&self, metadata: Gfn, watch: Content) -> io::Result<Served> {
        let Ok(held) = self.ledger.lock_frame(metadata) else { return Ok(Served::Busy) };
        let frame = FrameRange::new(metadata, 1);
        if held.content() != watch {
            self.after(held.abandon(), frame);
            return Ok(Served::Done);
        }
        let open = self.unprotect(frame);
        let wanted = held.unlock(Content::Resident);
        self.after(wanted, frame);
        open.map(|()| Served::Done)
    }

    fn give_back(&self, frames: FrameRange) -> io::Result<Served> {
        match self.refill(frames)? {
            true => Ok(Served::Done),
            false => Ok(Served::Busy),
        }
    }

    /// A frame that a fault has brought back meanwhile needs nothing.
    fn bring_back(&self, gfn: Gfn) -> io::Result<Served> {
        match self.ledger.content(gfn) {
            Content::Saved { .. } | Content::OnDisk { .. } => self.install_backed(gfn),
            _ => Ok(Served::Done),
        }
    }

    pub(crate) fn off_record(&self) -> Vec<(FrameRange, Content)> {
        self.ledger.runs().collect()
    }

    pub(crate) fn again(&self, attempt: impl FnMut() -> io::Result<Served>) -> io::Result<()> {
        self.again_for(ATTEMPTS, attempt)
    }

    pub(crate) fn again_for(
        &self,
        attempts_max: usize,
        mut attempt: impl FnMut() -> io::Result<Served>,
    ) -> io::Result<()> {
        for attempts in 0..attempts_max {
            match attempt()? {
                Served::Done => return Ok(()),
                Served::Busy if attempts < EAGER_ATTEMPTS => std::thread::yield_now(),
                Served::Busy => std::thread::sleep(PAUSE),
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "a frame is held and not let go"))
    }
}
