//! Memory for what reads as zero: holes that were never touched, and frames that were
//! emptied. A guest that goes on where the last ones ended gets more and more at once.

use std::io;

use ebb_ledger::{Content, Locked, SplitError};
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::install::Served;
use crate::pager::Pager;
use crate::read_ahead::ReadAhead;
use crate::unmapped::is_unmapped;

/// An ordinary emptied frame.
pub(crate) const EMPTY: Content = Content::Empty { fill: 0, hard: false };

impl Pager {
    /// Gives a frame that reads as zero its memory, and those behind it that do as
    /// well, as far as whoever touches them is known to go on.
    ///
    /// Under their words' locks: a frame that somebody else has given memory meanwhile
    /// may have been written and saved since, and must not read as zero again.
    pub(crate) fn install_zeros(&self, gfn: Gfn, ahead: &mut ReadAhead) -> io::Result<Served> {
        let window = match self.has_limit() {
            true => ahead.window(gfn.0).pages as u64,
            // What was emptied comes back only where it is touched, if nobody empties it
            // again of himself.
            false => 1,
        };
        let frames = FrameRange::new(gfn, window.min(self.frames_to_border(gfn)));
        // What was emptied as a whole comes back in parts.
        if self.ledger.content(gfn) == EMPTY {
            match self.split(gfn.huge()) {
                // Or not at all.
                Err(SplitError::NoRoom(_)) => {
                    return self.install_huge(gfn, EMPTY);
                }
                Err(_) => return Ok(Served::Busy),
                Ok(()) => {}
            }
        }
        let is_split = self.ledger.is_split(gfn.huge());
        let words = if is_split { frames } else { FrameRange::huge(gfn.huge()) };
        let held = self.ledger.lock(words).or_else(|busy| {
            self.after(busy.wanted, words);
            // The one that is asked for may be free for all that.
            if is_split { self.ledger.lock(FrameRange::new(gfn, 1)) } else { Err(busy) }
        });
        let Ok(held) = held else { return Ok(Served::Busy) };
        let (done, wanted) = self.zero_held(held, frames);
        self.after(wanted, words);
        if let Ok(Some(done)) = &done {
            ahead.read(gfn.0, done.end().0, done.count - 1);
        }
        Ok(if done?.is_some() { Served::Done } else { Served::Busy })
    }

    /// Gives frames that were just emptied, in one huge frame, their memory. `false`:
    /// some have none yet.
    pub(crate) fn install_run(&self, frames: FrameRange) -> io::Result<bool> {
        let held = match self.ledger.lock(frames) {
            Ok(held) => held,
            Err(busy) => {
                self.after(busy.wanted, frames);
                return Ok(false);
            }
        };
        let (done, wanted) = self.zero_held(held, frames);
        self.after(wanted, frames);
        Ok(done? == Some(frames))
    }

    /// Fills those of `frames` that are held and read as zero, up to the first that does
    /// not: which these are, if any. Also whether somebody asked for what was held.
    fn zero_held(
        &self,
        held: Locked<'_>,
        frames: FrameRange,
    ) -> (io::Result<Option<FrameRange>>, bool) {
        let first = held.contents().next();
        let content = match first {
            Some((_, Content::Resident)) => Content::Resident,
            Some((part, EMPTY)) if part.count == 1 => EMPTY,
            _ => return (Ok(None), held.abandon()),
        };
        let alike = held.contents().take_while(|(_, other)| *other == content);
        let alike = alike.last().map_or(frames.start, |(part, _)| part.end());
        let run = FrameRange::new(frames.start, alike.0.min(frames.end().0) - frames.start.0);
        if content == Content::Resident {
            // Nobody here made this hole.
            self.devices.lost(run);
        }
        let done = match self.zero_run(run) {
            Ok(done) => done,
            Err(error) => return (Err(error), held.abandon()),
        };
        let wanted = match content {
            EMPTY => {
                self.devices.map(done);
                self.count_returned([(done, EMPTY)].into_iter());
                let (held, wanted) = match held.frames().count > done.count {
                    true => held.keep(done.count),
                    false => (held, false),
                };
                held.unlock(Content::Resident) | wanted
            }
            _ => held.abandon(),
        };
        (self.wake(done).map(|()| Some(done)), wanted)
    }

    /// Frames from this one on, up to the border of its huge frame or its region.
    pub(crate) fn frames_to_border(&self, gfn: Gfn) -> u64 {
        let huge = FRAMES_PER_HUGE - gfn.index_in_huge() as u64;
        self.ram.region_of(gfn).map_or(1, |region| huge.min(region.frames().end().0 - gfn.0))
    }

    /// Fills frames until one that is there already; the first may be that one, and
    /// then its page wins. How far it came.
    fn zero_run(&self, frames: FrameRange) -> io::Result<FrameRange> {
        let bytes = match self.uffd.zero_run(self.hva(frames)?) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => FRAME_BYTES,
            // The VMM has parted its mapping here: no call goes beyond that.
            Err(_) if frames.count > 1 => {
                return self.zero_run(FrameRange::new(frames.start, 1));
            }
            Err(error) if is_unmapped(&error) => {
                self.fill(frames.start, 0)?;
                FRAME_BYTES
            }
            result => result?,
        };
        Ok(FrameRange::new(frames.start, bytes / FRAME_BYTES))
    }
}
