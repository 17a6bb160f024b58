//! Huge frames that devices map as a whole, or not at all.

use std::io;

use ebb_ledger::Content;
use ebb_units::{FrameRange, HugeFrame};

use crate::fault::installer::Installer;

/// What becomes of memory that devices cannot use, because mapping it failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Failed {
    /// It is punched: it held nothing before.
    Punch,
    /// It stays, as it may hold the guest's content.
    Keep,
}

impl Installer {
    /// Gives all of a huge frame memory and maps it for devices, if a part of it is empty. No vCPU
    /// writes to it before devices may use it. `false`: another thread has locked a part of it, or a
    /// part is neither resident nor empty.
    ///
    /// # Errors
    /// From the host: it has no memory, or the memory cannot be mapped. All is as it was.
    pub(crate) fn fill_whole(&self, huge: HugeFrame, failed: Failed) -> io::Result<bool> {
        let Some(held) = self.residency.lock_huge(huge) else { return Ok(false) };
        let (frames, is_empty) = (held.frames(), held.is_empty());
        let plain = |content| matches!(content, Content::Resident | Content::Empty { fill: 0, .. });
        let is_full = held.contents().all(|content| content == Content::Resident);
        if is_full || !held.contents().all(plain) {
            held.abandon();
            return Ok(is_full);
        }
        let failed = if is_empty { failed } else { Failed::Keep };
        if let Err(error) = self.fill_unseen(frames, failed) {
            held.abandon();
            return Err(error);
        }
        self.frames.counters().returned(held.runs());
        held.note_resident();
        // Before the unlock: after it, the frames may be protected anew.
        let open = self.frames.unprotect(frames);
        // A touch that was marked meanwhile is woken with the rest.
        let _ = held.unlock(Content::Resident);
        open.and(self.frames.wake(frames)).map(|()| true)
    }

    /// Gives all of a locked huge frame memory, and maps it for devices. Other vCPUs that got a part
    /// of it touch it too. They would go on as soon as their own page is there: before devices may
    /// use it, and before the rest is there.
    pub(crate) fn fill_unseen(&self, frames: FrameRange, failed: Failed) -> io::Result<()> {
        if !self.frames.devices().any() {
            // A touch of a page that is not there yet faults, and waits.
            return self.frames.ram().populate(frames);
        }
        // The protection stops them, as their touch is a write. Huge pages need it too: the host
        // may have none just now.
        self.frames.protect(frames)?;
        let filled = self.frames.ram().populate(frames);
        let mapped = filled.and_then(|()| self.frames.devices().map(frames));
        if mapped.is_err() {
            if failed == Failed::Punch {
                self.frames.punch(frames)?;
            }
            self.frames.unprotect(frames)?;
        }
        mapped
    }
}
