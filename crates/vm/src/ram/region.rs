//! A region of RAM, and a place in one.

use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FrameRange, Gpa, Hva};

/// A run of guest-physical addresses that is contiguous in the VMM's address space and in its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// First guest-physical address.
    pub gpa: Gpa,
    /// Length in bytes.
    pub bytes: u64,
    /// Its address in the VMM's address space.
    pub hva: Hva,
    /// Index in [`Ram::files`](super::Ram::files) of the file that it lies in.
    pub file: usize,
    /// Offset in that file.
    pub offset: u64,
}

impl Region {
    /// The frames of this region.
    pub fn frames(&self) -> FrameRange {
        FrameRange::new(self.gpa.gfn(), self.bytes / FRAME_BYTES)
    }

    /// The region's range in the VMM's address space.
    pub fn hva_range(&self) -> HvaRange {
        HvaRange { start: self.hva, bytes: self.bytes }
    }
}

/// A piece of RAM as the host knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilePlace {
    /// Address in the VMM's address space.
    pub hva: Hva,
    /// Index in [`Ram::files`](super::Ram::files) of the file that it lies in.
    pub file: usize,
    /// Offset in that file.
    pub offset: u64,
    /// Bytes from there to the end of the region.
    pub left_bytes: u64,
}
