//! Ranges of frames, as far as they are RAM of one region.

use std::{io, iter};

use ebb_sys::uffd::Watch;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};
use ebb_vm::Region;

use crate::frames::Frames;

impl Frames {
    /// What to watch in a range that holds page metadata: missing pages too where memory can be
    /// plugged.
    pub(crate) fn watch_of(&self, frames: FrameRange) -> Watch {
        let overlaps = |region: &FrameRange| {
            region.start.0 < frames.end().0 && frames.start.0 < region.end().0
        };
        match self.pluggable.get().is_some_and(|regions| regions.iter().any(overlaps)) {
            true => Watch::MissingAndWrite,
            false => Watch::Write,
        }
    }

    /// The huge frames of a range that consists of whole huge frames in one region. Anything else
    /// is `InvalidInput`.
    pub(crate) fn whole(&self, frames: FrameRange) -> io::Result<Vec<FrameRange>> {
        let parts: Vec<FrameRange> = frames.by_huge().collect();
        let is_whole = |part: &FrameRange| *part == FrameRange::huge(part.start.huge());
        match self.ram.range(frames).is_some() && parts.iter().all(is_whole) {
            true => Ok(parts),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Number of frames from this one up to the end of its huge frame or its region.
    pub(crate) fn frames_to_border(&self, gfn: Gfn) -> u64 {
        let huge = FRAMES_PER_HUGE - gfn.index_in_huge() as u64;
        self.ram.region_of(gfn).map_or(1, |region| huge.min(region.frames().end().0 - gfn.0))
    }

    /// Cuts a range where a region of RAM ends. What is no RAM stays in one piece.
    pub(crate) fn in_regions(&self, frames: FrameRange) -> impl Iterator<Item = FrameRange> {
        let mut start = frames.start;
        iter::from_fn(move || {
            let left = frames.end().0.checked_sub(start.0).filter(|left| *left > 0)?;
            let rest = FrameRange::new(start, left);
            let part = self.ram.clip(rest).unwrap_or(rest);
            start = part.end();
            Some(part)
        })
    }

    /// The part of the frame's huge frame that is RAM of the same region.
    pub(crate) fn part_in_ram(&self, gfn: Gfn) -> FrameRange {
        let huge = FrameRange::huge(gfn.huge());
        let region = self.ram.region_of(gfn).map_or(huge, Region::frames);
        let start = huge.start.max(region.start);
        FrameRange::new(start, huge.end().0.min(region.end().0) - start.0)
    }
}
