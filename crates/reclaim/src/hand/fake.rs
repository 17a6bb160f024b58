//! Made-up memory for tests of the hand.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use ebb_inspect::PageKind;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, HugeFrame};

use super::{HandMemory, Piece};
use crate::cost::Page;

pub(super) const WINDOW: u64 = FRAMES_PER_HUGE;

/// Memory of one kind. What is not `resident` is a hole.
pub(super) struct Fake {
    pub(super) kind: PageKind,
    pub(super) resident: Vec<bool>,
    pub(super) mapped: RefCell<Vec<bool>>,
    pub(super) stays: Box<dyn Fn(u64) -> bool>,
    pub(super) kernel: Range<u64>,
    pub(super) forgotten: RefCell<Vec<Vec<FrameRange>>>,
    pub(super) looks: Vec<u64>,
    /// How many windows of the page table were read.
    pub(super) reads: Cell<usize>,
    pub(super) now: Cell<Instant>,
    /// Most frames to forget at once; `None`: forgetting fails.
    pub(super) forgets: Option<u64>,
    /// How long forgetting takes.
    pub(super) forgetting: Duration,
    /// How long it takes to look at a window.
    pub(super) looking: Duration,
    /// How the frames of windows that were not broken up are evicted.
    pub(super) piece: Piece,
    /// Windows that were broken up; `None`: breaking up fails.
    pub(super) broken: RefCell<Option<Vec<HugeFrame>>>,
}

impl Fake {
    pub(super) fn new(windows: u64) -> Fake {
        let count = (windows * WINDOW) as usize;
        Fake {
            kind: PageKind::Anonymous,
            resident: vec![true; count],
            mapped: RefCell::new(vec![true; count]),
            stays: Box::new(|_| false),
            kernel: 0..0,
            forgotten: RefCell::default(),
            looks: Vec::new(),
            reads: Cell::new(0),
            now: Cell::new(Instant::now()),
            forgets: Some(u64::MAX),
            forgetting: Duration::ZERO,
            looking: Duration::ZERO,
            piece: Piece::Frames,
            broken: RefCell::new(Some(Vec::new())),
        }
    }

    pub(super) fn touch(&self, frames: Range<u64>) {
        frames.for_each(|gfn| self.mapped.borrow_mut()[gfn as usize] = true);
    }

    pub(super) fn evict(&mut self, frames: &[Gfn]) {
        for gfn in frames {
            self.resident[gfn.0 as usize] = false;
            self.mapped.borrow_mut()[gfn.0 as usize] = false;
        }
    }
}

impl HandMemory for Fake {
    fn now(&self) -> Instant {
        self.now.get()
    }

    fn next(&self, from: HugeFrame) -> Option<HugeFrame> {
        let from = from.first().0 as usize;
        let at = self.resident.get(from..)?.iter().position(|resident| *resident)?;
        Some(Gfn((from + at) as u64).huge())
    }

    fn mapped(&self, window: HugeFrame, saw: &mut dyn FnMut(FrameRange)) -> io::Result<()> {
        let mapped = self.mapped.borrow();
        self.reads.set(self.reads.get() + 1);
        let frames = FrameRange::huge(window).frames().filter(|gfn| mapped[gfn.0 as usize]);
        frames.for_each(|gfn| saw(FrameRange::new(gfn, 1)));
        Ok(())
    }

    fn forget(&self, ranges: &[FrameRange]) -> io::Result<u64> {
        let forgets = self.forgets.ok_or(io::ErrorKind::PermissionDenied)?;
        let frames = ranges.iter().flat_map(|range| range.frames());
        for gfn in frames.take(forgets.try_into().unwrap()) {
            self.mapped.borrow_mut()[gfn.0 as usize] = false;
        }
        self.forgotten.borrow_mut().push(ranges.to_vec());
        self.now.set(self.now.get() + self.forgetting);
        Ok(forgets)
    }

    fn look(&mut self, window: HugeFrame, saw: &mut dyn FnMut(Gfn, Page)) {
        self.looks.push(window.0);
        self.now.set(self.now.get() + self.looking);
        for gfn in FrameRange::huge(window).frames().filter(|gfn| self.resident[gfn.0 as usize]) {
            let is_kernel = self.kernel.contains(&gfn.0);
            let kind = if is_kernel { PageKind::Slab } else { self.kind };
            saw(gfn, Page { kind: Some(kind), ..Page::default() });
        }
    }

    fn may_go(&self, gfn: Gfn) -> bool {
        !(self.stays)(gfn.0)
    }

    fn piece(&self, window: HugeFrame) -> Piece {
        let is_broken = self.broken.borrow().iter().flatten().any(|broken| *broken == window);
        if is_broken { Piece::Frames } else { self.piece }
    }

    fn break_up(&self, windows: &[HugeFrame]) -> io::Result<()> {
        let mut broken = self.broken.borrow_mut();
        let broken = broken.as_mut().ok_or(io::ErrorKind::PermissionDenied)?;
        broken.extend(windows);
        Ok(())
    }
}
