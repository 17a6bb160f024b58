//! Huge frames of a guest whose allocator the host shares get memory as a whole when the guest
//! touches one again.

use crate::fault::sharer::{Sharer, Sharing};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use ebb_ledger::Content;
use ebb_units::{FrameRange, Gfn, HugeFrame};

use crate::fault::installer::Installer;
use crate::frames::words::{Served, again};

impl Installer {
    /// From now on `sharer` is asked about frames that were emptied, and told of those that
    /// came back.
    pub fn share(&self, sharer: Option<Arc<dyn Sharer>>) {
        *self.sharer.write().unwrap_or_else(PoisonError::into_inner) = sharer;
    }

    fn sharer(&self) -> Option<Arc<dyn Sharer>> {
        self.sharer.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves a touch of an emptied frame, if the guest's allocator has to do with it.
    pub(crate) fn install_shared(&self, gfn: Gfn) -> io::Result<Option<Served>> {
        let huge = gfn.huge();
        let Some(sharer) = self.sharer() else { return Ok(None) };
        if sharer.sharing(huge) == Sharing::Apart {
            return Ok(None);
        }
        let began = Instant::now();
        let Some(held) = self.residency.hold_huge(huge) else { return Ok(Some(Served::Busy)) };
        // It may have come back, or been taken for good, since it was asked about.
        let sharing = sharer.sharing(huge);
        if sharing == Sharing::Apart || !held.is_empty() {
            let gone = sharing != Sharing::Apart;
            held.let_go();
            // Of what is partly there, each frame is one like any other.
            return Ok(if gone { None } else { Some(Served::Busy) });
        }
        let frames = held.frames();
        if let Err(error) = self.fill_unseen(frames) {
            held.let_go();
            return Err(error);
        }
        self.frames.counters().returned(held.runs());
        match sharing {
            Sharing::Hard => sharer.violated(huge),
            // Memory first: who sees the guest's word changed does not touch any more.
            _ => sharer.installed(huge, began.elapsed()),
        }
        // Before the unlock: after it whoever evicts may protect the frames anew.
        let open = if self.frames.devices().any() { self.frames.unprotect(frames) } else { Ok(()) };
        // Whoever asked meanwhile is woken with the rest.
        let _ = held.unlock(Content::Resident);
        open.and(self.frames.wake(frames)).map(|()| Some(Served::Done))
    }

    /// Gives all of a held huge frame memory, and maps it for devices. Other vCPUs that got a
    /// part of it, and found E, touch it too, and would go on as soon as their own page is
    /// there: before devices may use it, and before the rest is there.
    fn fill_unseen(&self, frames: FrameRange) -> io::Result<()> {
        if !self.frames.devices().any() {
            // A touch of what is not there yet faults, and waits.
            return self.frames.ram().populate(frames);
        }
        // The touch is a write. Also with huge pages: the host may have none just now.
        self.frames.protect(frames)?;
        let filled = self.frames.ram().populate(frames);
        match filled {
            Ok(()) => self.frames.devices().map(frames),
            Err(_) => self.frames.unprotect(frames)?,
        }
        filled
    }

    /// Gives memory to what is empty of a huge frame.
    ///
    /// # Errors
    /// As [`crate::Returner::give_back_all`].
    pub fn fill_huge(&self, huge: HugeFrame) -> io::Result<()> {
        let frames = FrameRange::huge(huge);
        let empty: Vec<Gfn> = { frames.frames() }
            .filter(|&gfn| matches!(self.frames.ledger().content(gfn), Content::Empty { .. }))
            .collect();
        for gfn in empty {
            let fill = |content| match content {
                content @ Content::Empty { .. } => self.install(gfn, content),
                _ => Ok(Served::Done),
            };
            again(|| fill(self.frames.ledger().content(gfn)))?;
        }
        Ok(())
    }
}
