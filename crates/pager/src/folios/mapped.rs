//! Resident memory, mapped in this process too: by this mapping the kernel finds pages that it must
//! move between NUMA nodes, even where the VMM does not map them just then.

use std::io;

use ebb_units::{FrameRange, HugeFrame};

use crate::folios::{FolioMap, Grain};
use crate::residency::view::readable;

impl FolioMap {
    /// Maps the resident memory of a huge frame. Meanwhile nobody saves or brings back one of its
    /// frames, and a fault for one waits. A free block that is just being reclaimed may get memory
    /// again by this: zeros. `false`: another thread works on some of the frames, or memory in huge
    /// pages is partly non-resident, and nothing was mapped.
    ///
    /// # Errors
    /// As [`ebb_vm::Ram::map`].
    pub fn map_here(&self, huge: HugeFrame) -> io::Result<bool> {
        let frames = FrameRange::huge(huge);
        let held = match self.frames.ledger().lock(frames) {
            Ok(held) => held,
            Err(busy) => {
                self.frames.after(busy.wanted, frames);
                return Ok(false);
            }
        };
        let mut there: Vec<FrameRange> = Vec::new();
        for (frames, _) in held.contents().filter(|(_, content)| readable(*content)) {
            frames.join(&mut there);
        }
        // A touched hole gets memory for all of its huge page, also for evicted frames.
        let all = FrameRange::huge(huge);
        if self.grain_of(huge) == Grain::Huge
            && self.frames.ram().clip(all).is_some_and(|ram| there != [ram])
        {
            self.frames.after(held.abandon(), frames);
            return Ok(false);
        }
        let result = { there.into_iter().flat_map(|frames| self.frames.ram().parts(frames)) }
            .try_for_each(|frames| self.frames.ram().map(frames));
        self.frames.after(held.abandon(), frames);
        result.map(|()| true)
    }
}
