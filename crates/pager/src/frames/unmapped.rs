//! Memory that the VMM maps nowhere but has not given up: its file is open in the VMM, which can
//! map it again.
//!
//! Such memory cannot be protected, so none of it is evicted. Its evicted content comes back into
//! its file by a mapping of this process, which reaches the same memory. A userfaultfd watches that
//! mapping as well: only so is a page there as a whole or not at all, and only so does a page win
//! that another process has put there.

use std::io;

use ebb_sys::uffd::HvaRange;
use ebb_units::FrameRange;
use ebb_vm::Region;

use crate::frames::Frames;

impl Frames {
    /// Returns the RAM that the VMM does not map any more where it had it, as far as can be known.
    ///
    /// # Errors
    /// As [`ebb_vm::unplugged::mapped`].
    pub fn unmapped(&self) -> io::Result<Vec<FrameRange>> {
        let regions: Vec<Region> = self.ram.regions().copied().collect();
        let all: Vec<HvaRange> = regions.iter().map(Region::hva_range).collect();
        let mapped = self.of_ram(&all)?;
        let is_unmapped = |region: &&Region| !mapped.contains(&region.hva_range());
        Ok(regions.iter().filter(is_unmapped).map(Region::frames).collect())
    }
}
