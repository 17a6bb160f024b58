//! A range of page metadata, and the frames that it describes.

use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};

use super::RangeFault;
use crate::PageSize;

/// Frames that x86-64 can address: 2^52 bytes.
const MAX_FRAMES: u64 = 1 << 40;

/// Page metadata of frames in a row, in a row itself (V-Probe's paper, section 4.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MetadataRange {
    /// Address of the first frame's metadata, a multiple of 8.
    pub start: Gpa,
    /// Address behind the last frame's metadata.
    pub end: Gpa,
    /// The frames that the range describes.
    pub frames: FrameRange,
}

impl MetadataRange {
    /// The frames that hold the metadata, in whole or in part.
    pub fn metadata_frames(&self) -> FrameRange {
        let (first, last) = (self.start.gfn(), Gpa(self.end.0 - 1).gfn());
        FrameRange::new(first, last.0 - first.0 + 1)
    }

    pub(super) fn page_at(&self, gfn: Gfn, size: PageSize) -> Option<Gpa> {
        let index = gfn.0.checked_sub(self.frames.start.0)?;
        (index < self.frames.count).then(|| Gpa(self.start.0 + index * size.bytes() as u64))
    }

    pub(super) fn parse(words: &[u64; 4], size: PageSize) -> Result<MetadataRange, RangeFault> {
        let &[start, end, first_frame, end_frame] = words;
        if !start.is_multiple_of(8) || start >= end || end > MAX_FRAMES * FRAME_BYTES {
            return Err(RangeFault::Address);
        }
        if first_frame >= end_frame || end_frame > MAX_FRAMES {
            return Err(RangeFault::Frames);
        }
        let count = end_frame - first_frame;
        if end - start != count * size.bytes() as u64 {
            return Err(RangeFault::Size);
        }
        let frames = FrameRange::new(Gfn(first_frame), count);
        Ok(MetadataRange { start: Gpa(start), end: Gpa(end), frames })
    }

    /// Checks the range against those before it.
    pub(super) fn check_behind(&self, before: &[MetadataRange]) -> Result<(), RangeFault> {
        if before.last().is_some_and(|last| self.frames.start < last.frames.end()) {
            return Err(RangeFault::Order);
        }
        match before.iter().any(|other| self.start < other.end && other.start < self.end) {
            true => Err(RangeFault::Overlap),
            false => Ok(()),
        }
    }
}
