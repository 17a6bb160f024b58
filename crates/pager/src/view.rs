//! The guest's memory as inspection may read it.

use std::sync::atomic::AtomicU64;

use ebb_inspect::GuestMemory;
use ebb_ledger::{Content, Ledger};
use ebb_units::{FRAME_BYTES, FrameRange, Gpa};
use ebb_vm::Ram;

/// RAM, less what the ledger says is elsewhere: for a frame whose content is
/// in a store, the file has a hole, which is not what the guest would read.
pub struct View<'a> {
    /// The RAM.
    pub ram: &'a Ram,
    /// Where its content is.
    pub ledger: &'a Ledger,
}

impl View<'_> {
    fn is_here(&self, frames: FrameRange) -> bool {
        frames.by_huge().all(|part| match self.ledger.is_split(part.start.huge()) {
            false => readable(self.ledger.content(part.start)),
            true => part.frames().all(|gfn| readable(self.ledger.content(gfn))),
        })
    }
}

/// Metadata under watch is protected against writes only.
fn readable(content: Content) -> bool {
    matches!(content, Content::Resident | Content::Watch { .. })
}

impl GuestMemory for View<'_> {
    fn word(&self, gpa: Gpa) -> Option<u64> {
        readable(self.ledger.content(gpa.gfn())).then(|| self.ram.word(gpa))?
    }

    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]> {
        let bytes = u64::try_from(count).ok()?.checked_mul(8)?;
        let end = gpa.checked_add(bytes)?.0.div_ceil(FRAME_BYTES);
        let first = gpa.gfn();
        let frames = FrameRange::new(first, end.checked_sub(first.0)?);
        self.is_here(frames).then(|| self.ram.words(gpa, count))?
    }

    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)> {
        self.ram.next_populated(from)
    }

    fn segments(&self) -> Vec<(Gpa, u64)> {
        self.ram.regions().iter().map(|region| (region.gpa, region.bytes)).collect()
    }
}
