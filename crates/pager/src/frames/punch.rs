//! Returning memory to the host. The ledger must say before where the content is.

use std::io;

use ebb_units::{FrameRange, Gfn};

use crate::frames::Frames;
use crate::support::counters::add;

impl Frames {
    /// Returns the memory of frames in one region to the host.
    ///
    /// # Errors
    /// As fallocate(2).
    pub(crate) fn punch(&self, frames: FrameRange) -> io::Result<()> {
        self.puncher.punch(frames)
    }

    /// Punches frames that come in order, adjacent ones in one call, up to the first failure.
    /// Returns how many frames were punched.
    pub(crate) fn punch_runs(&self, each: impl Iterator<Item = FrameRange>) -> io::Result<u64> {
        let mut run = FrameRange::new(Gfn(0), 0);
        let mut result = Ok(0);
        for frames in each {
            let joined = FrameRange::new(run.start, run.count + frames.count);
            if run.end() == frames.start && self.ram.range(joined).is_some() {
                run = joined;
            } else {
                result = self.punch_on(run, result);
                run = frames;
            }
        }
        self.punch_on(run, result)
    }

    fn punch_on(&self, run: FrameRange, so_far: io::Result<u64>) -> io::Result<u64> {
        let frames = so_far?;
        if run.count > 0 {
            self.punch(run)?;
            add(&self.counters.reclaimed_frames, run.count);
        }
        Ok(frames + run.count)
    }
}
