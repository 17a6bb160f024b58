//! Disk-backed frames come back before their blocks are written.

use std::io;
use std::ops::Range;

use crate::device::access::DeviceAccess;
use crate::frames::words::{ATTEMPTS, SOON_ATTEMPTS, Served, again_for};

impl DeviceAccess {
    /// Brings back the frames that are disk-backed by `blocks`, which are about to change. Nothing
    /// may find these blocks any more: see [`crate::GuestDisk::find`].
    ///
    /// # Errors
    /// A frame cannot be brought back: the blocks must not be written.
    pub fn vacate(&self, blocks: Range<u64>) -> io::Result<()> {
        self.vacate_for(ATTEMPTS, blocks)
    }

    /// As [`DeviceAccess::vacate`], for a device that asks again for as long as it takes, as with
    /// [`DeviceAccess::pin_soon`].
    ///
    /// # Errors
    /// `TimedOut`: another thread has locked a frame now. Any other: as [`DeviceAccess::vacate`].
    pub fn vacate_soon(&self, blocks: Range<u64>) -> io::Result<()> {
        self.vacate_for(SOON_ATTEMPTS, blocks)
    }

    fn vacate_for(&self, attempts: usize, blocks: Range<u64>) -> io::Result<()> {
        for (block, gfn) in self.residency.disk_backed().on(blocks) {
            // The pair of block and frame goes only after the block was read.
            again_for(attempts, || match self.residency.disk_backed().has(gfn, block) {
                true if self.residency.drop_if_dead(gfn) => Ok(Served::Done),
                // The VMM has unplugged it: nobody reads it any more.
                true if self.frames.ram().region_of(gfn).is_none() => Ok(Served::Done),
                true => match self.installer.install_backed(gfn) {
                    // Unplugged just now.
                    Err(_) if self.frames.ram().region_of(gfn).is_none() => Ok(Served::Done),
                    done => done,
                },
                false => Ok(Served::Done),
            })?;
        }
        Ok(())
    }
}
