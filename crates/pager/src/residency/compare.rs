//! Content that comes back from a disk is compared with what was evicted.

use super::digests::Digests;
use crate::residency::Residency;
use ebb_store::Page;
use ebb_units::Gfn;
use std::io;

impl Residency {
    /// Has content that comes back from a disk compared with what was evicted, from now on. Must be
    /// called before anything is served.
    pub fn compare_with(&self, digests: Digests) {
        // A second call would be with the same file.
        let _ = self.digests.set(digests);
    }

    /// Notes the content of a frame that a block will back. `false`: there is no room for the note,
    /// so the block must not back it.
    pub(crate) fn note_block(&self, gfn: Gfn, block: u64, page: &Page) -> bool {
        self.digests.get().is_none_or(|digests| digests.note(gfn, block, page).is_ok())
    }

    /// Refuses content of a block that the frame never held.
    pub(crate) fn check_block(&self, gfn: Gfn, block: u64, page: &Page) -> io::Result<()> {
        let Some(digests) = self.digests.get() else { return Ok(()) };
        match digests.is_changed(gfn, block, page)? {
            true => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "an image of its disks was changed by somebody else while it backs evicted memory: \
                 restore its content; the guest waits for that",
            )),
            false => Ok(()),
        }
    }
}
