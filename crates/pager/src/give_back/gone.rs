//! Letting go of memory that the VMM has unplugged for good.
//!
//! Whoever calls this has proof that the VMM has the file no more. The order makes it safe to die
//! at any instruction, and to begin again:
//!
//! 1. The file is gone ([`ebb_vm::Ram::set_gone`]): from now on nobody finds a place for its frames, so
//!    nothing of it is taken, filled or watched any more.
//! 2. Each word becomes resident, and only then its slot or block is free: no word names a slot
//!    that another page may be put into. A slot that no word names is free for the next daemon.
//! 3. Watches on blocks of it end, so that nobody waits to write their metadata.
//! 4. This process lets go of the file, and its memory goes with the last who has it. It is not
//!    punched: another process may have it still, and no look can prove that none does.

use std::io;

use ebb_ledger::{Content, SplitError};
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};
use ebb_vm::Region;

use crate::frames::words::{Served, again};
use crate::give_back::Returner;

impl Returner {
    /// Lets go of all that lies in `file`, one of [`ebb_vm::Ram::files`], which the VMM has neither
    /// open nor mapped any more. Once more is no harm.
    ///
    /// # Errors
    /// The ledger has no room, a frame stays held, or as [`ebb_vm::ram::Backing::let_go`]: what is left
    /// is let go of by the next call. The file is gone in any case.
    pub fn let_go(&self, file: usize) -> io::Result<()> {
        self.frames.ram().set_gone(file);
        let regions: Vec<FrameRange> =
            self.frames.ram().regions_in(file).map(Region::frames).collect();
        for frames in &regions {
            frames.by_huge().try_for_each(|part| self.forget(part))?;
        }
        self.end_watches_on(|head| regions.iter().any(|frames| frames.contains(head)))?;
        let Some(backing) = self.frames.ram().files().get(file) else { return Ok(()) };
        backing.let_go()
    }

    /// Frames of one huge frame have nothing elsewhere from now on.
    fn forget(&self, frames: FrameRange) -> io::Result<()> {
        let is_whole = frames.count == FRAMES_PER_HUGE;
        let huge = frames.start.huge();
        again(|| {
            if !is_whole && !self.frames.ledger().is_split(huge) {
                // Its other part is another region, or no RAM.
                if self.frames.ledger().unlocked(frames.start) == Some(Content::Resident) {
                    return Ok(Served::Done);
                }
                match self.frames.split(huge) {
                    Ok(()) => {}
                    Err(SplitError::Busy) => return Ok(Served::Busy),
                    Err(SplitError::NoRoom(error)) => return Err(error),
                }
            }
            match self.frames.ledger().lock(frames) {
                Ok(held) => {
                    self.residency.release(held);
                    Ok(Served::Done)
                }
                Err(_) => Ok(Served::Busy),
            }
        })
    }

    /// Ends the watches on blocks with such a first frame, wherever their metadata lies.
    fn end_watches_on(&self, is_gone: impl Fn(Gfn) -> bool) -> io::Result<()> {
        for (frames, content) in self.frames.off_record() {
            if matches!(content, Content::Watch { head, .. } if is_gone(head)) {
                frames.frames().try_for_each(|gfn| again(|| self.end_watch(gfn, content)))?;
            }
        }
        Ok(())
    }
}
