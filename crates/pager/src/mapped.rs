//! What is in memory, mapped in this process too: by this the kernel finds pages that it is to
//! move between NUMA nodes, also where the VMM does not map them just then.

use std::io;

use ebb_units::{FrameRange, HugeFrame};

use crate::pager::Pager;
use crate::view::readable;

impl Pager {
    /// Maps what is in memory of a huge frame. Holes stay holes: nobody empties a frame
    /// meanwhile, and a fault for one waits for so long. `false`: somebody else works on some
    /// of them, and none was mapped.
    ///
    /// # Errors
    /// As madvise(2) for `MADV_POPULATE_READ` (Linux 5.14).
    pub fn map_here(&self, huge: HugeFrame) -> io::Result<bool> {
        let frames = FrameRange::huge(huge);
        let held = match self.ledger.lock(frames) {
            Ok(held) => held,
            Err(busy) => {
                self.after(busy.wanted, frames);
                return Ok(false);
            }
        };
        let mut there = held.contents().filter(|(_, content)| readable(*content));
        let result = there.try_for_each(|(frames, _)| self.ram.map(frames));
        drop(there);
        self.after(held.abandon(), frames);
        result.map(|()| true)
    }
}
