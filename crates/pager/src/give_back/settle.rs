//! After a restart: clearing up what a dead process was working on.

use std::io;

use ebb_ledger::Content;
use ebb_units::{FrameRange, Gfn};

use crate::fault::installer::whole::Failed;
use crate::frames::words::{Served, again};
use crate::give_back::Returner;
use crate::support::counters::subtract;

impl Returner {
    /// After a restart: restores a block that a dead daemon was working on, since nobody knows
    /// whether its metadata is still protected.
    ///
    /// # Errors
    /// As [`Returner::give_back_all`].
    pub fn settle_watch(&self, metadata: Gfn) -> io::Result<()> {
        again(|| self.installer.restore_watched(metadata))
    }

    /// Ends the watches without bringing their blocks back: for a VM in release mode, whose daemon
    /// died while it reclaimed them.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn end_watches(&self) -> io::Result<()> {
        for (frames, content) in self.frames.off_record() {
            if matches!(content, Content::Watch { .. }) {
                { frames.frames() }
                    .try_for_each(|metadata| again(|| self.end_watch(metadata, content)))?;
            }
        }
        Ok(())
    }

    /// After a restart: makes each evicted or empty frame resident on record whose page is there:
    /// it was not punched yet, or was brought back already. The page wins. A `Clean` frame, from a
    /// daemon of an older version, is protected until now; its slot is not claimed.
    ///
    /// # Errors
    /// As lseek(2) and ioctl_userfaultfd(2), and as [`crate::IoMapping::map`].
    pub fn settle(&self) -> io::Result<()> {
        let is_whole = self.frames.devices().is_whole();
        for (frames, content) in self.frames.off_record() {
            let there = match content {
                Content::Watch { .. } | Content::Unplugged => false,
                Content::Clean { .. } => true,
                // The file does not tell its holes. Locked frames were dealt with before
                // (`Residency::settle_locked`).
                Content::Empty { .. } if !self.frames.ram().knows_holes(frames) => false,
                _ => !self.frames.ram().is_hole(frames)?,
            };
            match content {
                _ if !there => {}
                // A part that is locked or of another kind was never empty as a whole.
                Content::Empty { .. } if is_whole => {
                    self.installer.fill_whole(frames.start.huge(), Failed::Keep)?;
                }
                _ => frames.frames().try_for_each(|gfn| self.settle_frame(gfn, content))?,
            }
        }
        Ok(())
    }

    fn settle_frame(&self, gfn: Gfn, content: Content) -> io::Result<()> {
        let frame = FrameRange::new(gfn, 1);
        let is_clean = matches!(content, Content::Clean { .. });
        let hole = !is_clean && self.frames.ram().is_hole(frame)?;
        if hole || self.frames.split(gfn.huge()).is_err() {
            return Ok(());
        }
        let Ok(held) = self.frames.ledger().lock_frame(gfn) else { return Ok(()) };
        if let Err(error) = self.frames.devices().map(frame) {
            self.frames.after(held.abandon(), frame);
            return Err(error);
        }
        let open = self.frames.unprotect_if_watched(frame);
        if let Content::Empty { .. } = held.content() {
            subtract(&self.frames.counters().empty_frames, 1);
        }
        let wanted = self.residency.arrive(gfn, held);
        self.frames.after(wanted, frame);
        open
    }

    /// Ends a watch, if the frame still is that watch: a frame that is protected for something
    /// else, such as another block's metadata, stays protected.
    pub(crate) fn end_watch(&self, metadata: Gfn, watch: Content) -> io::Result<Served> {
        let Ok(held) = self.frames.ledger().lock_frame(metadata) else { return Ok(Served::Busy) };
        let frame = FrameRange::new(metadata, 1);
        if held.content() != watch {
            self.frames.after(held.abandon(), frame);
            return Ok(Served::Done);
        }
        let open = self.frames.unprotect(frame);
        let wanted = held.unlock(Content::Resident);
        self.frames.after(wanted, frame);
        open.map(|()| Served::Done)
    }
}
