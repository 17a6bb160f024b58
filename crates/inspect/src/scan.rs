//! Scans over every frame.

use ebb_units::{FrameRange, Gfn, Gpa};

use crate::freed::in_place;
use crate::memory::for_windows;
use crate::page::{PAGE_BYTES, PageWords};
use crate::{GuestMemory, Lru, MAX_ORDER, Memmap, PageKind, PageLayout};

/// How many frames are of each kind.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FrameCounts {
    /// Free blocks by order, as `/proc/buddyinfo` counts them.
    pub free_blocks: [u64; MAX_ORDER as usize + 1],
    /// Anonymous memory (meminfo's AnonPages).
    pub anonymous_frames: u64,
    /// Page cache and shared memory (Cached, Buffers).
    pub file_frames: u64,
    /// Kernel objects, as `/proc/slabinfo` counts them. meminfo's Slab also counts kernel
    /// allocations above two frames. These are no slabs, and count as other frames here.
    pub slab_frames: u64,
    /// Page tables (PageTables, SecPageTables).
    pub table_frames: u64,
    /// hugetlbfs (Hugetlb). Those whose metadata the kernel has mostly freed
    /// (`hugetlb_free_vmemmap=on`) are in no count.
    pub hugetlb_frames: u64,
    /// Unplugged by virtio-mem, or ballooned on newer kernels.
    pub offline_frames: u64,
    /// The rest: kernel image, reserved, per-CPU free lists, drivers.
    pub other_frames: u64,
    /// Frames whose metadata could not be read.
    pub unknown_frames: u64,
}

impl FrameCounts {
    /// Number of frames in free blocks.
    pub fn free_frames(&self) -> u64 {
        let blocks = self.free_blocks.iter().enumerate();
        blocks.map(|(order, &count)| count << order).sum()
    }

    /// Number of all frames counted.
    pub fn frames(&self) -> u64 {
        self.free_frames()
            + self.anonymous_frames
            + self.file_frames
            + self.slab_frames
            + self.table_frames
            + self.hugetlb_frames
            + self.offline_frames
            + self.other_frames
            + self.unknown_frames
    }

    fn add(&mut self, kind: PageKind, frames: u64) {
        let count = match kind {
            PageKind::Anonymous => &mut self.anonymous_frames,
            PageKind::File => &mut self.file_frames,
            PageKind::Slab => &mut self.slab_frames,
            PageKind::Table => &mut self.table_frames,
            PageKind::Hugetlb => &mut self.hugetlb_frames,
            PageKind::Offline => &mut self.offline_frames,
            PageKind::Free { .. } | PageKind::Tail | PageKind::Other => &mut self.other_frames,
        };
        *count += frames;
    }
}

impl Memmap {
    /// Counts every known frame by kind.
    pub fn count(&self, mem: &dyn GuestMemory, layout: &PageLayout) -> FrameCounts {
        let mut counts = FrameCounts::default();
        counts.unknown_frames = self.kinds(mem, layout, |frames, kind| match kind {
            PageKind::Free { order } => counts.free_blocks[usize::from(order)] += 1,
            kind => counts.add(kind, frames.count),
        });
        counts
    }

    /// Visits all frames by kind, in order: each free block, and each row of frames of one kind.
    /// Returns the number of frames whose metadata cannot be read.
    pub fn kinds(
        &self,
        mem: &dyn GuestMemory,
        layout: &PageLayout,
        mut visit: impl FnMut(FrameRange, PageKind),
    ) -> u64 {
        let decode = |page: &PageWords, next: Option<&PageWords>| (layout.decode(page, next), ());
        let mut scan = Scan::new(decode, |frames, kind, ()| visit(frames, kind));
        self.windows(mem, |first, window| match window {
            Ok(pages) => scan.window(first, pages),
            Err(frames) => scan.unreadable(first, frames),
        });
        scan.turn((PageKind::Other, ()));
        scan.unknown
    }

    /// Visits `frames` by kind, each row with its flags of the guest's reclaim. A free block may
    /// reach beyond `frames` on both sides.
    pub fn kinds_in(
        &self,
        mem: &dyn GuestMemory,
        layout: &PageLayout,
        frames: FrameRange,
        visit: impl FnMut(FrameRange, PageKind, Lru),
    ) {
        let decode = |page: &PageWords, next: Option<&PageWords>| {
            (layout.decode(page, next), layout.lru_of(page))
        };
        let read = |gpa| in_place(mem, gpa);
        let first = self.metadata_gpa(frames.start).and_then(read);
        let mut scan = Scan::new(decode, visit);
        let mut compound = NOTHING;
        match first.map(|page| layout.decode(&page, None)) {
            Some(PageKind::Tail) => {
                let head = self.telling(layout, frames.start, &read);
                let next = head.as_ref().and_then(|(gfn, _)| self.metadata_gpa(Gfn(gfn.0 + 1)));
                let next = next.and_then(read);
                let found = head.map(|(_, page)| decode(&page, next.as_ref()));
                // A tail is never in a free block.
                let found = found.filter(|(kind, _)| !matches!(kind, PageKind::Free { .. }));
                compound = found.unwrap_or(NOTHING);
            }
            // A frame inside a free block looks like this.
            Some(PageKind::Other) => {
                if let Some((head, order)) = self.block_before(mem, layout, frames.start) {
                    scan.next = head.0 + scan.free(head.0, order) as u64;
                }
            }
            _ => {}
        }
        (scan.start, scan.compound) = (scan.next.max(frames.start.0), compound);
        self.windows_in(mem, frames, |first, window| match window {
            Ok(pages) => scan.window(first, pages),
            Err(frames) => scan.unreadable(first, frames),
        });
        scan.turn(NOTHING);
    }

    /// The free block that holds `gfn` and begins before it.
    fn block_before(
        &self,
        mem: &dyn GuestMemory,
        layout: &PageLayout,
        gfn: Gfn,
    ) -> Option<(Gfn, u8)> {
        (1..=layout.max_order()).find_map(|order| {
            let head = Gfn(gfn.0 & (u64::MAX << order));
            let page = in_place(mem, self.metadata_gpa(head).filter(|_| head < gfn)?)?;
            let found = layout.free_order(&page)?;
            (found >= order && self.is_block(head, found)).then_some((head, found))
        })
    }

    /// Visits every free block of at least `min_order`, by address. Looks only where one can begin.
    pub fn free_blocks(
        &self,
        mem: &dyn GuestMemory,
        layout: &PageLayout,
        min_order: u8,
        mut visit: impl FnMut(Gfn, u8),
    ) {
        let step = 1 << min_order.min(MAX_ORDER);
        let (mut next, mut taken) = (0, 0);
        self.windows(mem, |first, window| {
            let Ok(pages) = window else { return };
            next = next.max(first).next_multiple_of(step);
            while let Some(page) = pages.get((next - first) as usize) {
                let order = layout.free_order(page).filter(|&order| order >= min_order);
                let here = Gfn(next);
                next += step;
                let Some(order) = order else { continue };
                if here.0 >= taken && self.is_block(here, order) {
                    visit(here, order);
                    taken = here.0 + (1 << order);
                }
                // If it is near, the place of the next look must not depend on what this one finds:
                // the CPU then has several looks in flight at once.
                if taken > next + NEAR_STEPS * step {
                    next = taken;
                }
            }
        });
    }

    /// Visits the metadata in windows. Each has its first frame, and either the metadata or the
    /// number of frames whose metadata cannot be read.
    pub(crate) fn windows(
        &self,
        mem: &dyn GuestMemory,
        visit: impl FnMut(u64, Result<&[PageWords], u64>),
    ) {
        self.windows_in(mem, FrameRange::new(Gfn(0), u64::MAX), visit);
    }

    /// Visits the metadata of `frames` in windows, as [`Memmap::windows`] does.
    fn windows_in(
        &self,
        mem: &dyn GuestMemory,
        frames: FrameRange,
        mut visit: impl FnMut(u64, Result<&[PageWords], u64>),
    ) {
        let after = self.runs().partition_point(|run| run.first <= frames.start);
        for run in &self.runs()[after.saturating_sub(1)..] {
            let start = run.first.0.max(frames.start.0);
            let end = (run.first.0 + run.frames).min(frames.end().0);
            if start >= frames.end().0 {
                return;
            }
            let metadata = Gpa(run.metadata.0 + (start - run.first.0).min(run.frames) * PAGE_BYTES);
            let bytes = end.saturating_sub(start) * PAGE_BYTES;
            for_windows(mem, metadata, bytes, |offset, words| {
                let first = start + offset / PAGE_BYTES;
                visit(first, words.map(|words| words.as_chunks().0).map_err(|n| n / PAGE_BYTES));
            });
        }
    }

    /// Whether a free block of `order` may begin at `head`.
    pub(crate) fn is_block(&self, head: Gfn, order: u8) -> bool {
        let block = FrameRange::block(head, order);
        head.0.is_multiple_of(block.count) && self.in_ram(block)
    }
}

/// A frame of which nothing is known.
const NOTHING: (PageKind, Lru) = (PageKind::Other, Lru::NONE);
/// Fewest looks inside a free block that are worth skipping.
const NEAR_STEPS: u64 = 16;

struct Scan<T, D, V> {
    decode: D,
    /// First frame not visited yet: a free block can reach beyond its window.
    next: u64,
    visit: V,
    /// What the last page that is not a tail was. Its tails have the same use.
    compound: (PageKind, T),
    start: u64,
    run: u64,
    unknown: u64,
}

impl<T, D, V> Scan<T, D, V>
where
    T: Copy + PartialEq + Default,
    D: Fn(&PageWords, Option<&PageWords>) -> (PageKind, T),
    V: FnMut(FrameRange, PageKind, T),
{
    fn new(decode: D, visit: V) -> Scan<T, D, V> {
        let compound = (PageKind::Other, T::default());
        Scan { decode, next: 0, visit, compound, start: 0, run: 0, unknown: 0 }
    }

    fn window(&mut self, first: u64, pages: &[PageWords]) {
        let mut index = usize::try_from(self.next.saturating_sub(first)).unwrap_or(usize::MAX);
        if first + index as u64 != self.start + self.run {
            // These frames do not follow those before them.
            self.turn((PageKind::Other, T::default()));
            self.start = first + index as u64;
        }
        while let Some(page) = pages.get(index) {
            let found = (self.decode)(page, pages.get(index + 1));
            index += match found.0 {
                PageKind::Free { order } => self.free(first + index as u64, order),
                _ => self.used(found),
            };
        }
        self.next = self.next.max(first + index as u64);
    }

    /// Counts a frame that is in use, and returns 1.
    #[inline(always)]
    fn used(&mut self, found: (PageKind, T)) -> usize {
        if found != self.compound && found.0 != PageKind::Tail {
            self.turn(found);
        }
        self.run += 1;
        1
    }

    /// Counts a free block, and returns its number of frames.
    fn free(&mut self, gfn: u64, order: u8) -> usize {
        if !gfn.is_multiple_of(1 << order) {
            return self.used((PageKind::Other, T::default()));
        }
        self.turn((PageKind::Other, T::default()));
        let block = FrameRange::block(Gfn(gfn), order);
        (self.visit)(block, PageKind::Free { order }, T::default());
        self.start = gfn + (1 << order);
        1 << order
    }

    /// Visits the frames counted so far, and begins a row of another kind.
    fn turn(&mut self, found: (PageKind, T)) {
        if self.run > 0 {
            (self.visit)(
                FrameRange::new(Gfn(self.start), self.run),
                self.compound.0,
                self.compound.1,
            );
        }
        (self.compound, self.start, self.run) = (found, self.start + self.run, 0);
    }

    fn unreadable(&mut self, first: u64, frames: u64) {
        self.turn((PageKind::Other, T::default()));
        let counted = self.next.saturating_sub(first).min(frames);
        self.unknown += frames - counted;
        self.next = self.next.max(first + frames);
    }
}
