//! Memory for frames that read as zero: holes that were never touched, and empty frames. A guest
//! that goes on where the last frames ended gets more and more at once.

use crate::frames::words::EMPTY;
use std::io;

use ebb_ledger::{Content, Locked, SplitError};
use ebb_units::{FrameRange, Gfn};

use crate::fault::installer::Installer;
use crate::fault::read_ahead::ReadAhead;
use crate::frames::words::Served;

/// Most frames to give memory at once: as many as fit between the high mark and the smallest limit.
const ZEROS_MAX: usize = 256;

impl Installer {
    /// Gives a frame that reads as zero its memory, and also the frames behind it that read as
    /// zero, as far as the guest is known to go on.
    ///
    /// This happens under the locks of their words: a frame that another thread has given memory
    /// meanwhile may have been written and saved since, and must not read as zero again.
    pub(crate) fn install_zeros(&self, gfn: Gfn, ahead: &mut ReadAhead) -> io::Result<Served> {
        let window = match self.room.has_limit() {
            true => ahead.window(gfn.0).pages.min(ZEROS_MAX),
            // Without a limit nobody empties a frame again by itself, so an empty frame comes back
            // only when it is touched.
            false => 1,
        };
        let share = self.room.coming().share(window, || self.room.room());
        let window = share.frames() as u64;
        let frames = FrameRange::new(gfn, window.min(self.frames.frames_to_border(gfn)));
        // A huge frame that was reclaimed as a whole comes back in parts.
        if self.frames.ledger().content(gfn) == EMPTY {
            match self.frames.split(gfn.huge()) {
                // Without room in the ledger it comes back as a whole.
                Err(SplitError::NoRoom(_)) => {
                    return self.install_huge(gfn, EMPTY);
                }
                Err(_) => return Ok(Served::Busy),
                Ok(()) => {}
            }
        }
        let is_split = self.frames.ledger().is_split(gfn.huge());
        let words = if is_split { frames } else { FrameRange::huge(gfn.huge()) };
        let held = self.frames.ledger().lock(words).or_else(|busy| {
            self.frames.after(busy.wanted, words);
            // The frame that was touched may be free all the same.
            if is_split { self.frames.ledger().lock(FrameRange::new(gfn, 1)) } else { Err(busy) }
        });
        let Ok(held) = held else { return Ok(Served::Busy) };
        let (done, wanted) = self.zero_locked(held, frames);
        self.frames.after(wanted, words);
        if let Ok(Some(done)) = &done {
            ahead.read(gfn.0, done.end().0, done.count - 1);
        }
        Ok(if done?.is_some() { Served::Done } else { Served::Busy })
    }

    /// Gives frames of one huge frame that were just made empty their memory. `false`: some have
    /// none yet.
    pub(crate) fn install_run(&self, frames: FrameRange) -> io::Result<bool> {
        let held = match self.frames.ledger().lock(frames) {
            Ok(held) => held,
            Err(busy) => {
                self.frames.after(busy.wanted, frames);
                return Ok(false);
            }
        };
        let (done, wanted) = self.zero_locked(held, frames);
        self.frames.after(wanted, frames);
        Ok(done? == Some(frames))
    }

    /// Fills those of `frames` that are locked and read as zero, up to the first that does not.
    /// Returns the filled range, if any, and whether a touch of the locked words was marked.
    fn zero_locked(
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
            // The pager did not make this hole.
            self.frames.devices().lost(run);
        }
        let done = match self.frames.zero_run(run) {
            Ok(done) => done,
            Err(error) => return (Err(error), held.abandon()),
        };
        if content == EMPTY
            && let Err(error) = self.frames.devices().map(done)
        {
            return (Err(error), held.abandon());
        }
        let wanted = match content {
            EMPTY => {
                self.frames.counters().returned([(done, EMPTY)].into_iter());
                let (held, wanted) = match held.frames().count > done.count {
                    true => held.keep(done.count),
                    false => (held, false),
                };
                held.unlock(Content::Resident) | wanted
            }
            _ => held.abandon(),
        };
        (self.frames.wake(done).map(|()| Some(done)), wanted)
    }
}
