//! Huge frames of a guest whose allocator the host shares get memory as a whole when the guest
//! touches one again.

use crate::fault::sharer::{Sharer, Sharing};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use ebb_ledger::Content;
use ebb_units::{FrameRange, Gfn, HugeFrame};

use crate::fault::installer::Installer;
use crate::fault::installer::whole::Failed;
use crate::frames::words::{Served, again};

impl Installer {
    /// From now on `sharer` is asked about empty frames, and told of those that get memory.
    pub fn share(&self, sharer: Option<Arc<dyn Sharer>>) {
        *self.sharer.write().unwrap_or_else(PoisonError::into_inner) = sharer;
    }

    fn sharer(&self) -> Option<Arc<dyn Sharer>> {
        self.sharer.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves a touch of an empty frame, if the guest's allocator governs it.
    pub(crate) fn install_shared(&self, gfn: Gfn) -> io::Result<Option<Served>> {
        let huge = gfn.huge();
        let Some(sharer) = self.sharer() else { return Ok(None) };
        if sharer.sharing(huge) == Sharing::Apart {
            return Ok(None);
        }
        let began = Instant::now();
        let Some(held) = self.residency.lock_huge(huge) else { return Ok(Some(Served::Busy)) };
        // It may have come back, or become hard, since it was asked about.
        let sharing = sharer.sharing(huge);
        if sharing == Sharing::Apart || !held.is_empty() {
            let is_shared = sharing != Sharing::Apart;
            held.abandon();
            // Where a part is resident, each frame is served as an ordinary one.
            return Ok(if is_shared { None } else { Some(Served::Busy) });
        }
        let frames = held.frames();
        if let Err(error) = self.fill_unseen(frames, Failed::Punch) {
            held.abandon();
            return Err(error);
        }
        self.frames.counters().returned(held.runs());
        held.note_resident();
        match sharing {
            Sharing::Hard => sharer.violated(huge),
            // Memory first: a vCPU that sees the guest's word changed does not touch the frame any
            // more.
            _ => sharer.installed(huge, began.elapsed()),
        }
        // Before the unlock: after it, the evictor may protect the frames anew.
        let open = if self.frames.devices().any() { self.frames.unprotect(frames) } else { Ok(()) };
        // A touch that was marked meanwhile is woken with the rest.
        let _ = held.unlock(Content::Resident);
        open.and(self.frames.wake(frames)).map(|()| Some(Served::Done))
    }

    /// Gives memory to the empty frames of a huge frame.
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
