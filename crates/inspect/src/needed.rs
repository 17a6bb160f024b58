//! The frames that every look at a guest reads. If they are evicted, the next look refills them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};

use crate::page::{PAGE_BYTES, PageWords};
use crate::{Guest, GuestMemory, Memmap, Run, Walk};

/// Guest memory that records which frames are read word by word, whether or not they are resident.
struct Noted<'a> {
    mem: &'a dyn GuestMemory,
    memmap: &'a Memmap,
    frames: RefCell<BTreeSet<Gfn>>,
}

impl GuestMemory for Noted<'_> {
    fn word(&self, gpa: Gpa) -> Option<u64> {
        let frame = FrameRange::new(gpa.gfn(), 1);
        if self.memmap.in_ram(frame) {
            self.frames.borrow_mut().insert(frame.start);
        }
        self.mem.word(gpa)
    }

    fn page(&self, gpa: Gpa) -> Option<PageWords> {
        self.mem.page(gpa)
    }

    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]> {
        self.mem.words(gpa, count)
    }

    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)> {
        self.mem.next_populated(from)
    }

    fn segments(&self) -> Vec<(Gpa, u64)> {
        self.mem.segments()
    }
}

impl Guest {
    /// The frames without which nothing is known of this guest: its note, its metadata, and the
    /// page tables, sections and zones on the way there.
    pub fn needed_frames(&self, mem: &dyn GuestMemory) -> Vec<FrameRange> {
        let noted = Noted { mem, memmap: self.memmap(), frames: RefCell::default() };
        // Each is called for what it reads. Its result does not matter.
        let _ = (self.recheck(&noted), self.image_agrees(&noted));
        let _ = (self.memmap().changed(&noted), self.free_bytes(&noted));
        self.memmap().runs().iter().for_each(|run| self.memmap().walk_all(&noted, run));
        let words = noted.frames.into_inner().into_iter().map(|gfn| FrameRange::new(gfn, 1));
        words
            .chain([self.note().frames()])
            .chain(self.memmap().runs().iter().map(Run::metadata_frames))
            .collect()
    }
}

impl Run {
    /// The frames that hold this run's metadata.
    pub fn metadata_frames(&self) -> FrameRange {
        let end = self.metadata.0 + self.frames * PAGE_BYTES;
        let first = self.metadata.gfn();
        FrameRange::new(first, end.div_ceil(FRAME_BYTES) - first.0)
    }
}

impl Memmap {
    /// Walks to each leaf that maps metadata of `run`.
    fn walk_all(&self, mem: &dyn GuestMemory, run: &Run) {
        let mut at = run.first.0;
        while let Some(left) = (run.first.0 + run.frames).checked_sub(at).filter(|left| *left > 0)
            && let Some(va) = self.page_va(Gfn(at))
        {
            let (Walk::Mapped { bytes, .. } | Walk::Absent { bytes }) = self.tables().walk(mem, va);
            at += (bytes / PAGE_BYTES).clamp(1, left);
        }
    }
}
