//! Releasing memory that the VMM has unplugged for good.
//!
//! The caller has proof that the VMM has the file no more. The order makes it safe to die at any
//! instruction, and to begin again:
//!
//! 1. The file is marked as unplugged ([`ebb_vm::Ram::set_unplugged`]): from now on nobody finds a
//!    place for its frames, so none of it is reclaimed, evicted, filled or watched any more.
//! 2. Each word becomes resident, and only then its slot or block is freed: no word names a slot
//!    that another page may be put into. A slot that no word names is free for the next daemon.
//! 3. Watches on its blocks end, so that nobody waits to write their metadata.
//! 4. This process releases the file, whose memory is freed with the last process that has it. It
//!    is not punched: another process may still have it, and no check can prove that none does.

use std::io;

use ebb_ledger::{Content, SplitError};
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};
use ebb_vm::Region;

use crate::frames::words::{Served, again};
use crate::give_back::Returner;

impl Returner {
    /// Releases all that lies in `file`, an index of [`ebb_vm::Ram::files`], which the VMM neither
    /// has open nor maps any more. A second call does no harm.
    ///
    /// # Errors
    /// The ledger has no room, a frame stays locked, or as [`ebb_vm::ram::Backing::release`]: the
    /// next call releases what is left. The file is marked as unplugged in any case.
    pub fn release_file(&self, file: usize) -> io::Result<()> {
        self.frames.ram().set_unplugged(file);
        let regions: Vec<FrameRange> =
            self.frames.ram().regions_in(file).map(Region::frames).collect();
        for frames in &regions {
            frames.by_huge().try_for_each(|part| self.forget(part))?;
        }
        self.end_watches_on(|head| regions.iter().any(|frames| frames.contains(head)))?;
        let Some(backing) = self.frames.ram().files().get(file) else { return Ok(()) };
        backing.release()
    }

    /// Makes frames of one huge frame resident on record, and frees their slots and blocks.
    fn forget(&self, frames: FrameRange) -> io::Result<()> {
        let is_whole = frames.count == FRAMES_PER_HUGE;
        let huge = frames.start.huge();
        again(|| {
            if !is_whole && !self.frames.ledger().is_split(huge) {
                // The other part of the huge frame is in another region, or no RAM.
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

    /// Ends the watches on blocks whose first frame satisfies `is_released`, wherever their
    /// metadata lies.
    fn end_watches_on(&self, is_released: impl Fn(Gfn) -> bool) -> io::Result<()> {
        for (frames, content) in self.frames.off_record() {
            if matches!(content, Content::Watch { head, .. } if is_released(head)) {
                frames.frames().try_for_each(|gfn| again(|| self.end_watch(gfn, content)))?;
            }
        }
        Ok(())
    }
}
