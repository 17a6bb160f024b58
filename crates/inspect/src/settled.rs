//! Whether no request that the guest submitted earlier is still writing to a frame.
//!
//! A kernel marks a page before it lets a device write to it, and removes the mark after the device
//! has ended. Page cache is locked. Any other page is pinned: it has a reference beyond those of
//! its mappings and its caches. A page under writeback is only read by the device. Some memory
//! bears no such mark: a kernel's own memory, and pages whose parts are locked one by one
//! (`PG_private`). Such frames never count as settled. Kernel by kernel and file system by file
//! system: `docs/decisions/0031-the-guest-tells-what-is-in-flight.md`.
//!
//! A request in flight leaves its mark during the whole look, so a single look finds it. Numbers
//! that are compared are read at one instant: references and mappings share a word.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use ebb_units::Gfn;

use crate::freed::Places;
use crate::page::{Field, PAGE_BYTES};
use crate::{Guest, GuestMemory, MAX_ORDER, PageLayout};

/// `PG_locked`, the first flag in every kernel.
const LOCKED: u64 = 1;
/// Bit of `mapping`: anonymous memory, including KSM's.
const ANONYMOUS: u64 = 1;
/// Bits of `mapping`: not page cache.
const NO_CACHE: u64 = 0b11;
/// What btrfs and f2fs keep in `private` of file pages without buffers. It is no pointer.
const NO_BUFFERS: u64 = 1;

/// The words of one `struct page` in place, in memory that the guest changes.
type InPlace<'a> = &'a [AtomicU64];

impl Guest {
    /// Returns for each of `frames` whether no request submitted before this look is still writing
    /// to it. `false` for a frame of which that is not known: such a frame stays resident.
    ///
    /// The caller has protected the frames before, so that later requests fault. Afterwards the
    /// caller checks that this kernel still runs.
    pub fn settled(&self, mem: &dyn GuestMemory, frames: &[Gfn]) -> Vec<bool> {
        let by: Vec<Option<Gfn>> = frames.iter().map(|&gfn| self.settled_by(mem, gfn)).collect();
        let (mut own, mut heads) = (Places::new(self, mem), Places::new(self, mem));
        let each = frames.iter().zip(by);
        each.map(|(&gfn, by)| by.is_some_and(|by| own.is_there(gfn) && heads.is_there(by)))
            .collect()
    }

    /// Same as [`Guest::settled`] for one frame, but only as a hint for choosing frames: the answer
    /// may change, and the metadata may have moved.
    pub fn looks_settled(&self, mem: &dyn GuestMemory, gfn: Gfn) -> bool {
        self.settled_by(mem, gfn).is_some()
    }

    /// The frame whose `struct page` proves that `gfn` is settled. A compound in flight is neither
    /// split nor freed, so the tail may be read before its head.
    fn settled_by(&self, mem: &dyn GuestMemory, gfn: Gfn) -> Option<Gfn> {
        let layout = self.layout();
        let page = self.page_in_place(mem, gfn)?;
        if layout.compound.load(page) & 1 == 0 {
            let large = layout.flags.load(page) & layout.head_mask != 0;
            let settled = if large { self.head_settled(mem, gfn) } else { layout.is_settled(page) };
            return settled.then_some(gfn);
        }
        let head = self.head_of(page)?;
        let inside = head < gfn && gfn.0 - head.0 < 1 << MAX_ORDER;
        (inside && self.head_settled(mem, head)).then_some(head)
    }

    /// Whether the compound page with this head is settled. One in the page cache is settled if
    /// only the cache refers to it, with one reference for each frame. That is so if the compound
    /// has as many frames as it has references: if the last of so many frames is a part of it. Such
    /// a compound is mapped nowhere.
    fn head_settled(&self, mem: &dyn GuestMemory, head: Gfn) -> bool {
        let layout = self.layout();
        let Some(page) = self.page_in_place(mem, head) else { return false };
        if layout.compound.load(page) & 1 != 0 || layout.flags.load(page) & layout.head_mask == 0 {
            return false;
        }
        if layout.mapping.load(page) & ANONYMOUS != 0 {
            return self.huge_settled(mem, head, page);
        }
        let Some(others) = layout.cache_references(page) else { return false };
        let last = Gfn(head.0.saturating_add(u64::from(others).saturating_sub(1)));
        let part = || self.head_of(self.page_in_place(mem, last)?);
        (2..=1 << MAX_ORDER).contains(&others) && part() == Some(head)
    }

    /// Whether an anonymous huge page is settled: a single process maps it as a whole. It has one
    /// reference, and then one mapping, read in this order. If the reference were a request's,
    /// nobody would map the page. Nor could it be mapped again, because migration and splitting
    /// need all references first.
    fn huge_settled(&self, mem: &dyn GuestMemory, head: Gfn, page: InPlace<'_>) -> bool {
        let layout = self.layout();
        let whole = || {
            let second = self.page_in_place(mem, Gfn(head.0 + 1))?;
            // The count starts at -1.
            let count = layout.usage.as_ref()?.whole_mapcount?.load(second) as u32;
            (self.head_of(second) == Some(head) && count == 0).then_some(())
        };
        layout.is_at_rest(layout.flags.load(page))
            && layout.references(page).is_some_and(|(all, _)| all == 1)
            && whole().is_some()
    }

    /// The head that a tail page points to.
    fn head_of(&self, page: InPlace<'_>) -> Option<Gfn> {
        let word = self.layout().compound.load(page);
        let points = self.layout().usage.as_ref().is_some_and(|usage| usage.points);
        (points && word & 1 != 0).then(|| self.memmap().gfn_at(word - 1))?
    }

    fn page_in_place<'a>(&self, mem: &'a dyn GuestMemory, gfn: Gfn) -> Option<InPlace<'a>> {
        mem.words(self.memmap().metadata_gpa(gfn)?, PAGE_BYTES as usize / 8)
    }
}

impl PageLayout {
    /// Whether a page that is not part of a compound is settled.
    fn is_settled(&self, page: InPlace<'_>) -> bool {
        if self.mapping.load(page) & ANONYMOUS == 0 {
            return self.cache_references(page) == Some(1);
        }
        // The page stays anonymous until it is freed.
        self.is_at_rest(self.flags.load(page))
            && self.references(page).is_some_and(|(all, mapped)| all > 0 && all == mapped)
    }

    /// References to a page in the page cache, without those of its mappings and of its file
    /// system's private data. The mappings of a compound are counted elsewhere, so its result
    /// includes their references. `None` if the page is locked, not page cache, or has private data
    /// of unknown use.
    fn cache_references(&self, page: InPlace<'_>) -> Option<u32> {
        let usage = self.usage.as_ref()?;
        let mapping = self.mapping.load(page);
        let cached = mapping & NO_CACHE == 0 && mapping >> 63 == 1;
        let flags = self.flags.load(page);
        if !cached || !self.is_at_rest(flags) {
            return None;
        }
        let private = match flags & usage.private != 0 {
            false => 0,
            true if self.private.load(page) == NO_BUFFERS => 1,
            true => return None,
        };
        let (all, mapped) = self.references(page)?;
        let mapped = if flags & self.head_mask == 0 { mapped } else { 0 };
        // A page that has left the cache while a request has a reference does not come back.
        (self.mapping.load(page) == mapping).then(|| all.checked_sub(mapped + private))?
    }

    /// Whether the page is on an LRU list, as only page cache and anonymous memory are, and not
    /// locked.
    fn is_at_rest(&self, flags: u64) -> bool {
        let lru = self.usage.as_ref().map_or(0, |usage| usage.lru);
        flags & lru != 0 && flags & (LOCKED | self.slab_flag) == 0
    }

    /// Counts references and mappings, both at one instant. `None` if the page has a type.
    fn references(&self, page: InPlace<'_>) -> Option<(u32, u32)> {
        let refcount = self.usage.as_ref()?.refcount;
        if refcount.word != self.mapcount.word {
            return None;
        }
        let word = page.get(refcount.word)?.load(SeqCst);
        let all = (word >> refcount.shift) as u32;
        let mapped = ((word >> self.mapcount.shift) as u32).wrapping_add(1);
        (all <= i32::MAX as u32 && mapped <= i32::MAX as u32).then_some((all, mapped))
    }
}

impl Field {
    /// Loads the field in place, in program order.
    fn load(self, page: InPlace<'_>) -> u64 {
        page.get(self.word).map_or(0, |word| word.load(SeqCst) >> (self.shift % 64))
    }
}
