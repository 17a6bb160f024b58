//! Windows of a VM's memory, as a limit's hand looks at them.

use std::io;
use std::time::Instant;

use ebb_inspect::{BuddyBlock, PageKind};
use ebb_ledger::Content;
use ebb_pager::{Grain, Pager};
use ebb_sys::pagemap::Pagemap;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, HugeFrame};

use crate::cost::Page;
use crate::hand::{HandMemory, Piece};
use crate::limit::judge::{Known, Sources, holding};

/// What the VMM is made to do with its page table.
pub trait Vmm {
    /// Takes pages out of the VMM's page table, in order, as far as a few milliseconds get.
    /// Returns how many bytes of the ranges it got to.
    ///
    /// # Errors
    /// The VMM cannot be made to do it.
    fn forget(&self, ranges: &[HvaRange]) -> io::Result<u64>;

    /// Has the frames of huge frames evicted one by one from now on.
    ///
    /// # Errors
    /// As [`Vmm::forget`]; `WouldBlock`: not now.
    fn break_up(&self, pager: &Pager, windows: &[HugeFrame]) -> io::Result<()>;
}

/// A VM's memory, and the sources that know what is in it.
pub struct Windows<'a> {
    /// The sources that know what frames are.
    pub of: Sources<'a>,
    /// The pager of the same VM.
    pub pager: &'a Pager,
    /// The VMM of the same VM.
    pub vmm: &'a dyn Vmm,
    /// The VMM's page table.
    pub pagemap: &'a Pagemap,
    /// Whether a frame must stay resident.
    pub spare: &'a dyn Fn(Gfn) -> bool,
    /// How hot a frame is.
    pub heat: &'a dyn Fn(Gfn) -> usize,
    /// Whether a block of a disk may equal a frame.
    pub has_disk: bool,
    is_without_room: bool,
    unmapped: Vec<FrameRange>,
    /// Free blocks that were seen since they were last taken.
    free: Vec<BuddyBlock>,
}

impl<'a> Windows<'a> {
    /// The windows of a VM.
    pub fn new(
        of: Sources<'a>,
        (pager, vmm): (&'a Pager, &'a dyn Vmm),
        pagemap: &'a Pagemap,
        spare: &'a dyn Fn(Gfn) -> bool,
        heat: &'a dyn Fn(Gfn) -> usize,
        has_disk: bool,
    ) -> Windows<'a> {
        let (unmapped, free, is_without_room) = (Vec::new(), Vec::new(), false);
        Windows { of, pager, vmm, pagemap, spare, heat, has_disk, is_without_room, unmapped, free }
    }

    /// Begins a search. What the VMM has not mapped stays. If the store has no room, what needs
    /// room stays too.
    pub fn begin(&mut self, unmapped: &[FrameRange], is_without_room: bool) {
        self.unmapped = unmapped.to_vec();
        self.is_without_room = is_without_room;
    }

    /// The free blocks that were seen, in order of address.
    pub fn take_free(&mut self) -> Vec<BuddyBlock> {
        let mut free = std::mem::take(&mut self.free);
        free.sort_unstable();
        apart(&mut free);
        free
    }

    /// Drops the kept content of a window's frames that the guest has freed. Returns the number of
    /// these frames. `None`: there is no trusted guest, or the window has one ledger word and
    /// nothing of it was evicted.
    pub fn drop_freed(&self, window: HugeFrame) -> Option<usize> {
        let (guest, _) = self.of.guest?;
        let ledger = self.pager.ledger();
        if !ledger.is_split(window) {
            return None;
        }
        let all = FrameRange::huge(window);
        let is_evicted = |gfn: &Gfn| ledger.content(*gfn).is_evicted();
        let evicted: Vec<Gfn> = all.frames().filter(is_evicted).collect();
        // A question for each frame would take too long.
        if evicted.is_empty() || self.of.hears_late {
            return Some(0);
        }
        let mut free = Vec::new();
        guest.memmap().kinds_in(&self.pager.view(), guest.layout(), all, |frames, kind, _| {
            if let PageKind::Free { order } = kind {
                free.push(BuddyBlock { head: frames.start, order });
            }
        });
        let known = Known::new(self.of, self.pager, &free);
        let is_free = |gfn: &&Gfn| holding(&free, **gfn, BuddyBlock::frames).is_some();
        let freed = evicted.iter().filter(is_free);
        Some(freed.filter(|gfn| self.pager.residency().drop_if_free(**gfn, &known)).count())
    }

    /// The parts of a range that are RAM, each in one region.
    fn parts(&self, frames: FrameRange) -> impl Iterator<Item = (FrameRange, HvaRange)> {
        let ram = self.pager.ram();
        ram.parts(frames).filter_map(|part| Some((part, ram.hva_range(part)?)))
    }

    /// How many frames of the ranges, holes included, lie before the end of their first `bytes`
    /// bytes of RAM.
    fn reached(&self, ranges: &[FrameRange], bytes: u64) -> u64 {
        let (mut left, mut before) = (bytes, 0);
        for frames in ranges {
            for (part, range) in self.parts(*frames) {
                if left < range.bytes {
                    return before + (part.start.0 - frames.start.0) + left / FRAME_BYTES;
                }
                left -= range.bytes;
            }
            before += frames.count;
        }
        before
    }

    /// The resident parts of a window.
    fn populated(&self, window: FrameRange) -> Vec<FrameRange> {
        let ram = self.pager.ram();
        // A region that leaves meanwhile has none.
        self.parts(window)
            .flat_map(|(part, _)| ram.populated_in(part).unwrap_or_default())
            .collect()
    }
}

impl HandMemory for Windows<'_> {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn next(&self, from: HugeFrame) -> Option<HugeFrame> {
        self.pager.ram().next_data(from.gpa()).map(|start| start.gfn().huge())
    }

    fn mapped(&self, window: HugeFrame, saw: &mut dyn FnMut(FrameRange)) -> io::Result<()> {
        self.parts(FrameRange::huge(window)).try_for_each(|(frames, range)| {
            self.pagemap.mapped(range, |part| {
                let into = (part.start.0 - range.start.0) / FRAME_BYTES;
                saw(FrameRange::new(Gfn(frames.start.0 + into), part.bytes / FRAME_BYTES));
            })
        })
    }

    fn forget(&self, ranges: &[FrameRange]) -> io::Result<u64> {
        let parts = ranges.iter().flat_map(|frames| self.parts(*frames));
        let parts: Vec<HvaRange> = parts.map(|(_, range)| range).collect();
        let bytes = match parts.is_empty() {
            true => 0,
            false => self.vmm.forget(&parts)?,
        };
        Ok(self.reached(ranges, bytes))
    }

    fn look(&mut self, window: HugeFrame, saw: &mut dyn FnMut(Gfn, Page)) {
        let all = FrameRange::huge(window);
        let mut pages = [None; FRAMES_PER_HUGE as usize];
        let there = self.populated(all);
        for gfn in there.iter().flat_map(|frames| frames.frames()) {
            let page = Page { has_disk: self.has_disk, ..Page::default() };
            pages[gfn.index_in_huge()] = match self.pager.ledger().content(gfn) {
                Content::Resident => {
                    Some(Page { is_kept: self.pager.residency().keeps_slot(gfn), ..page })
                }
                _ => None,
            };
        }
        // The window as a whole: non-resident frames may tell what the frames after them are a part
        // of.
        if let Some((guest, _)) = self.of.guest.filter(|_| !there.is_empty()) {
            let (view, free) = (self.pager.view(), &mut self.free);
            guest.memmap().kinds_in(&view, guest.layout(), all, |run, kind, lru| {
                if let PageKind::Free { order } = kind {
                    free.push(BuddyBlock { head: run.start, order });
                }
                let (start, end) = (run.start.max(all.start), run.end().min(all.end()));
                for gfn in (start.0..end.0).map(Gfn) {
                    if let Some(page) = &mut pages[gfn.index_in_huge()] {
                        (page.kind, page.lru) = (Some(kind), lru);
                    }
                }
            });
        }
        for (gfn, page) in all.frames().zip(pages) {
            let Some(page) = page else { continue };
            let stays = self.is_without_room && !page.goes_unwritten();
            saw(gfn, Page { heat: (self.heat)(gfn), stays, ..page });
        }
    }

    fn piece(&self, window: HugeFrame) -> Piece {
        match self.pager.folios().grain_of(window) {
            Grain::Frame => Piece::Frames,
            Grain::Huge if self.pager.folios().can_break_up(window) => Piece::Breakable,
            Grain::Huge => Piece::Whole,
        }
    }

    fn break_up(&self, windows: &[HugeFrame]) -> io::Result<()> {
        self.vmm.break_up(self.pager, windows)
    }

    fn may_go(&self, gfn: Gfn) -> bool {
        !self.unmapped.iter().any(|frames| frames.contains(gfn)) && !(self.spare)(gfn)
    }
}

/// Removes blocks that begin inside another one: they were seen at different times.
fn apart(blocks: &mut Vec<BuddyBlock>) {
    let mut end = Gfn(0);
    blocks.retain(|block| {
        let is_apart = block.head >= end;
        end = end.max(block.frames().end());
        is_apart
    });
}

#[cfg(test)]
pub(crate) mod machine;
#[cfg(test)]
mod tests;
