//! Bringing everything back: before the VM is let go, and when its guest was
//! reset.

use std::io;

use ebb_ledger::Content;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::install::Served;
use crate::pager::Pager;

/// A word that its holder does not let go of in so many looks is an error.
const ATTEMPTS: usize = 10_000;

impl Pager {
    /// Brings every emptied frame back and ends every watch. Returns the bytes
    /// brought back. Faults are served meanwhile.
    ///
    /// # Errors
    /// `ENOMEM`: the host has not enough memory; what is not back stays on
    /// record and is served on touch.
    pub fn give_back_all(&self) -> io::Result<u64> {
        let before = self.counters.emptied_frames.load(std::sync::atomic::Ordering::Relaxed);
        // The watches first: each brings its block back before its devices.
        for (frames, content) in self.off_record() {
            if let Content::Watch { head, order } = content {
                for metadata in frames.frames() {
                    self.again(|| self.restore(metadata, head, order))?;
                }
            }
        }
        for (frames, content) in self.off_record() {
            if matches!(content, Content::Empty { .. }) {
                self.again(|| self.give_back(frames))?;
                self.devices.map(frames);
            }
        }
        Ok(before * FRAME_BYTES)
    }

    /// Ends the watches without bringing their blocks back: for a VM in
    /// release mode, whose daemon died while it emptied them.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn end_watches(&self) -> io::Result<()> {
        for (frames, content) in self.off_record() {
            if matches!(content, Content::Watch { .. }) {
                frames.frames().try_for_each(|metadata| self.end_watch(metadata))?;
            }
        }
        Ok(())
    }

    fn end_watch(&self, metadata: Gfn) -> io::Result<()> {
        if let Ok(held) = self.ledger.lock_frame(metadata) {
            let _ = held.unlock(Content::Resident);
        }
        self.unprotect(FrameRange::new(metadata, 1))
    }

    fn give_back(&self, frames: FrameRange) -> io::Result<Served> {
        match self.refill(frames)? {
            true => Ok(Served::Done),
            false => Ok(Served::Busy),
        }
    }

    fn off_record(&self) -> Vec<(FrameRange, Content)> {
        self.ledger.runs().collect()
    }

    fn again(&self, mut attempt: impl FnMut() -> io::Result<Served>) -> io::Result<()> {
        for _ in 0..ATTEMPTS {
            match attempt()? {
                Served::Done => return Ok(()),
                Served::Busy => std::thread::yield_now(),
            }
        }
        Err(io::Error::other("a frame is held and not let go"))
    }
}
