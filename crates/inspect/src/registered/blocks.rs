//! Which blocks a registration says are free.

use std::sync::atomic::Ordering::Relaxed;

use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_vprobe::MetadataRange;

use super::Registered;
use crate::memory::in_ram;
use crate::{BuddyBlock, ChosenBlocks, FreeBlocks, GuestMemory, Head, Request};

/// Greatest order of a block as Ebb sees it. Of a greater block the first 4 MiB count: all of it
/// is taken by a write to the same metadata.
const MAX_ORDER: u8 = 10;
/// Heads that are evaluated at a time.
const LANES: usize = 64;

impl FreeBlocks for Registered {
    /// From the highest frame down. The blocks of the lowest frames are left to the guest, up to
    /// `request.reserve_bytes`.
    fn victims(
        &self,
        mem: &dyn GuestMemory,
        request: Request,
        out: &mut Vec<BuddyBlock>,
    ) -> ChosenBlocks {
        let least = request.min_order.max(self.least_order());
        let mut free = Vec::new();
        for range in self.record.ranges() {
            self.free_blocks(mem, range, least, &mut free);
        }
        let mut chosen = ChosenBlocks::default();
        let mut left = free.as_slice();
        while let Some((first, rest)) = left.split_first()
            && chosen.reserved_bytes < request.reserve_bytes
        {
            chosen.reserved_bytes += first.frames().bytes();
            left = rest;
        }
        for &block in left.iter().rev() {
            if chosen.bytes >= request.want_bytes {
                break;
            }
            chosen.bytes += block.frames().bytes();
            out.push(block);
        }
        chosen
    }

    /// None if the metadata lies in two frames.
    fn metadata_frame(&self, head: Gfn) -> Option<Gfn> {
        let page = self.record.page_at(head)?;
        let last = Gpa(page.0 + self.record.page_size().bytes() as u64 - 1);
        (page.gfn() == last.gfn()).then(|| page.gfn())
    }

    fn heads<'a>(&'a self, mem: &'a dyn GuestMemory) -> Box<dyn FnMut(Gfn) -> Option<Head> + 'a> {
        Box::new(|gfn| self.head(mem, gfn))
    }
}

impl Registered {
    /// The least order of blocks whose first frames never share a frame of metadata.
    pub fn least_order(&self) -> u8 {
        let pages = FRAME_BYTES.div_ceil(self.record.page_size().bytes() as u64);
        pages.next_power_of_two().trailing_zeros() as u8
    }

    /// Returns the head of the free block that begins at `gfn`, if one does, by its metadata now.
    pub fn head(&self, mem: &dyn GuestMemory, gfn: Gfn) -> Option<Head> {
        let metadata = self.metadata_frame(gfn)?;
        let mut found = Vec::new();
        self.evaluate(mem, &[gfn], &mut found);
        let block = found.first()?;
        Some(Head { order: block.order, metadata })
    }

    /// Appends the free blocks of one range, of order `least` or more, in order.
    fn free_blocks(
        &self,
        mem: &dyn GuestMemory,
        range: &MetadataRange,
        least: u8,
        out: &mut Vec<BuddyBlock>,
    ) {
        let step = 1 << least;
        let mut heads = Vec::with_capacity(LANES);
        let mut at = Gfn(range.frames.start.0.next_multiple_of(step));
        while at < range.frames.end() {
            heads.clear();
            while heads.len() < LANES && at < range.frames.end() {
                heads.push(at);
                at = Gfn(at.0.saturating_add(step));
            }
            let first = out.len();
            self.evaluate(mem, &heads, out);
            keep_apart(out, first, least);
            // What lies inside of a free block is not looked at.
            if let Some(last) = out.last() {
                at = at.max(last.frames().end());
            }
        }
    }

    /// Appends those of `heads` that are the first frames of free blocks.
    fn evaluate(&self, mem: &dyn GuestMemory, heads: &[Gfn], out: &mut Vec<BuddyBlock>) {
        let words = self.record.page_size().words();
        let (mut known, mut pages) = (Vec::with_capacity(heads.len()), Vec::new());
        for &gfn in heads {
            let Some(page) = self.record.page_at(gfn) else { continue };
            if read(mem, page, words, &mut pages) {
                known.push(gfn);
            }
        }
        let (mut free, mut order) = (Vec::new(), Vec::new());
        self.page_free.evaluate(&pages, &mut free);
        self.page_order.evaluate(&pages, &mut order);
        let values = known.iter().zip(free).zip(order);
        out.extend(values.filter_map(|((&gfn, free), order)| self.block(gfn, free, order)));
    }

    /// The block of this order that begins at `gfn`, if the guest may mean one.
    fn block(&self, gfn: Gfn, free: u64, order: u64) -> Option<BuddyBlock> {
        let order = u8::try_from(order).ok().filter(|&order| order <= self.record.max_order())?;
        let frames = FrameRange::block(gfn, order);
        let is_whole =
            |range: &MetadataRange| range.frames.start <= gfn && frames.end() <= range.frames.end();
        let is_valid = free != 0
            && gfn.0.is_multiple_of(frames.count)
            && in_ram(&self.ram, frames)
            && self.record.ranges().iter().any(is_whole);
        is_valid.then_some(BuddyBlock { head: gfn, order: order.min(MAX_ORDER) })
    }
}

/// Drops blocks from `first` on that are smaller than `least`, or lie in the block before them.
fn keep_apart(blocks: &mut Vec<BuddyBlock>, first: usize, least: u8) {
    let mut end = match first.checked_sub(1) {
        Some(last) => blocks[last].frames().end(),
        None => Gfn(0),
    };
    let mut kept = first;
    for index in first..blocks.len() {
        let block = blocks[index];
        if block.order >= least && block.head >= end {
            blocks[kept] = block;
            (kept, end) = (kept + 1, block.frames().end());
        }
    }
    blocks.truncate(kept);
}

/// Appends `count` words from `at` on, each read once. Returns whether it did: not if one is not
/// resident.
fn read(mem: &dyn GuestMemory, at: Gpa, count: usize, out: &mut Vec<u64>) -> bool {
    let Some(words) = mem.words(at, count) else { return false };
    out.extend(words.iter().map(|word| word.load(Relaxed)));
    true
}
