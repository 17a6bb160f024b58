//! Whether the guest has freed a frame since it was page cache or anonymous memory.
//!
//! The allocator clears every flag of a page that is freed (`free_pages_prepare`), and nothing else
//! clears the last flag of a page whose content somebody may still read. So a page that was in use,
//! and now looks as the allocator hands it out, has been freed in between. Kernel by kernel:
//! `docs/decisions/0012-dead-frames-at-the-fault.md`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_units::{Gfn, Gpa};

use crate::page::{Field, PAGE_BYTES, PageWords, flag};
use crate::{Guest, GuestMemory, MAX_ORDER, Memmap, Note, PageLayout, Untrusted};

/// Flags that every known kernel has at least (`NR_PAGEFLAGS`), from bit 0 on. The node, the zone
/// and the generation above them stay when a page is freed.
const LOW_FLAGS: u64 = (1 << 19) - 1;

/// Fields and flags that tell whether a page is in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Usage {
    pub(crate) refcount: Field,
    pub(crate) lru: u64,
    /// `PG_private`: the page's file system has attached something, such as buffers.
    pub(crate) private: u64,
    /// All bits that are known to be flags.
    flags: u64,
    /// Whether a tail page has its head's address.
    pub(crate) points: bool,
    /// Where the second page of a compound counts the mappings of the whole. Known before 6.3 only,
    /// where it lies between fields that the note gives.
    pub(crate) whole_mapcount: Option<Field>,
}

impl Usage {
    pub(crate) fn new(note: &Note) -> Result<Usage, Untrusted> {
        let lacks = Untrusted::Lacks;
        let lru = flag(note, "PG_lru").ok_or(lacks("PG_lru"))?;
        let backed = flag(note, "PG_swapbacked").ok_or(lacks("PG_swapbacked"))?;
        let head = note.number("PG_head_mask")?;
        let named = ["PG_private", "PG_swapcache", "PG_slab", "PG_hwpoison"];
        let named = named.iter().filter_map(|name| flag(note, name)).fold(0, |all, bit| all | bit);
        Ok(Usage {
            refcount: Field::new(note, "page._refcount", 4)?,
            lru,
            private: flag(note, "PG_private").ok_or(lacks("PG_private"))?,
            flags: LOW_FLAGS | lru | backed | head | named,
            points: note.offset("page.compound_head").is_ok(),
            whole_mapcount: whole_mapcount(note),
        })
    }
}

fn whole_mapcount(note: &Note) -> Option<Field> {
    let fields = ["page.compound_dtor", "page.compound_order"].map(|name| note.offset(name));
    let known = note.version() < (6, 3) && fields == [Ok(16), Ok(17)];
    known.then_some(Field { word: 2, shift: 32 })
}

impl PageLayout {
    /// Whether the page is page cache or anonymous memory, in use. Of a compound page, pass the
    /// head.
    fn is_in_use(&self, page: &PageWords) -> bool {
        let Some(usage) = &self.usage else { return false };
        let mapping = self.mapping.of(page);
        // Bit 1 alone marks a driver's page, which is on no LRU list either.
        let mapped = mapping != 0 && mapping & 0b11 != 0b10;
        let referenced = usage.refcount.of(page) as u32 as i32 > 0;
        self.flags.of(page) & usage.lru != 0 && mapped && referenced && !self.is_typed(page)
    }

    /// Whether the page is free, has a use that a page gets only when it is allocated, or has just
    /// been allocated and not been used yet. Of a compound page, pass the head.
    fn is_free_or_new(&self, page: &PageWords) -> bool {
        self.is_typed(page) || self.is_new(page)
    }

    fn is_new(&self, page: &PageWords) -> bool {
        let Some(usage) = &self.usage else { return false };
        let flags = self.flags.of(page) & usage.flags;
        // 0: allocated by a kernel that counts later (6.14), or on a CPU's free list.
        let count = usage.refcount.of(page) as u32;
        (flags == 0 || flags == self.head_mask)
            && count <= 1
            && self.mapcount.of(page) as u32 == u32::MAX
            && self.mapping.of(page) == 0
            && self.private.of(page) == 0
    }

    /// Whether the page has a type: in the field where pages in use count their mappings, or as the
    /// slab flag of older kernels.
    fn is_typed(&self, page: &PageWords) -> bool {
        let kind = self.mapcount.of(page) as u32 as i32;
        kind < -1 || self.flags.of(page) & self.slab_flag != 0
    }

    /// Address of the `struct page` that describes this page. `Ok(None)` means its own, `Err` that
    /// it cannot be known.
    fn head_va(&self, page: &PageWords) -> Result<Option<u64>, ()> {
        let word = self.compound.of(page);
        match (word & 1, &self.usage) {
            (0, _) => Ok(None),
            (_, Some(usage)) if usage.points => Ok(Some(word - 1)),
            _ => Err(()),
        }
    }
}

impl Memmap {
    /// The frame whose `struct page` describes `gfn`, and that page.
    pub(crate) fn telling(
        &self,
        layout: &PageLayout,
        gfn: Gfn,
        read: &dyn Fn(Gpa) -> Option<PageWords>,
    ) -> Option<(Gfn, PageWords)> {
        let page = read(self.metadata_gpa(gfn)?)?;
        let Some(va) = layout.head_va(&page).ok()? else { return Some((gfn, page)) };
        let head = self.gfn_at(va).filter(|head| *head < gfn && gfn.0 - head.0 < 1 << MAX_ORDER)?;
        let page = read(self.metadata_gpa(head)?)?;
        // A head is not a tail.
        matches!(layout.head_va(&page), Ok(None)).then_some((head, page))
    }
}

impl Guest {
    /// Returns for each of `frames` whether it is page cache or anonymous memory in use. The result
    /// is valid for [`Guest::looks_freed`] of this guest, too: both read the metadata at its place
    /// when the guest was inspected, and this function then checks by the page tables that it is
    /// still there.
    pub fn in_use(&self, mem: &dyn GuestMemory, frames: &[Gfn]) -> Vec<bool> {
        let read = |gpa| in_place(mem, gpa);
        let telling = |gfn: &Gfn| {
            let (by, page) = self.memmap().telling(self.layout(), *gfn, &read)?;
            self.layout().is_in_use(&page).then_some(by)
        };
        let by: Vec<Option<Gfn>> = frames.iter().map(telling).collect();
        let (mut own, mut heads) = (Places::new(self, mem), Places::new(self, mem));
        let each = frames.iter().zip(by);
        each.map(|(&gfn, by)| by.is_some_and(|by| own.is_there(gfn) && heads.is_there(by)))
            .collect()
    }

    /// Whether a frame that was in use ([`Guest::in_use`]) has been freed since. `read` reads
    /// metadata, as [`GuestMemory::page`] does.
    pub fn looks_freed(&self, gfn: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool {
        let look = || {
            let (by, page) = self.memmap().telling(self.layout(), gfn, read)?;
            self.layout().is_free_or_new(&page).then_some(by)
        };
        // Two looks must agree on the same page. They differ if a huge page is being split, whose
        // parts' flags are off for a moment, or if its head is read after it was freed.
        look().is_some_and(|by| look() == Some(by))
    }
}

pub(crate) fn in_place(mem: &dyn GuestMemory, gpa: Gpa) -> Option<PageWords> {
    let words: &PageWords = mem.words(gpa, PAGE_BYTES as usize / 8)?.try_into().ok()?;
    Some(words.each_ref().map(|word| AtomicU64::new(word.load(Relaxed))))
}

/// Checks whether metadata is still where it was when the guest was inspected.
pub(crate) struct Places<'a> {
    guest: &'a Guest,
    mem: &'a dyn GuestMemory,
    /// The metadata frame asked for last, and the answer.
    last: Option<(Gfn, bool)>,
}

impl<'a> Places<'a> {
    pub(crate) fn new(guest: &'a Guest, mem: &'a dyn GuestMemory) -> Places<'a> {
        Places { guest, mem, last: None }
    }

    /// Whether the metadata of `gfn` is still there. Asks once for neighbours in one metadata
    /// frame.
    pub(crate) fn is_there(&mut self, gfn: Gfn) -> bool {
        let Some(known) = self.guest.memmap().metadata_gpa(gfn) else { return false };
        match self.last {
            Some((frame, is_there)) if frame == known.gfn() => is_there,
            _ => {
                let is_there = self.guest.memmap().walk(self.mem, gfn) == Some(known);
                self.last = Some((known.gfn(), is_there));
                is_there
            }
        }
    }
}
