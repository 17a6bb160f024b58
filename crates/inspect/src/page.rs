//! `struct page`: what it tells of its frame.
//!
//! | kernel | page type, in the word shared with `_mapcount` |
//! |---|---|
//! | 5.10 | buddy 0x80, offline 0x100, table 0x400; the bit is cleared |
//! | 5.11 - 6.9 | table 0x200 |
//! | 6.10 | adds hugetlb 0x800, slab 0x1000 |
//! | 6.11 | buddy 0x40000000, offline 0x20000000, table 0x10000000 |
//! | 6.12 on | the top byte: buddy f0, offline f1, table f2, hugetlb f4, slab f5 |
//!
//! The note gives all of these types but the page table's, which follows from the buddy type.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::freed::Usage;
use crate::lru::LruFlags;
use crate::{Note, Untrusted};

/// Greatest order of a block in any kernel's buddy allocator: 2^20 frames.
pub const MAX_ORDER: u8 = 20;

/// What a frame is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageKind {
    /// The first frame of a free block of `1 << order` frames.
    Free {
        /// The block's order, at most the kernel's greatest.
        order: u8,
    },
    /// A frame of a compound page that is not its first: of the same use as the frame before it.
    Tail,
    /// Unplugged by virtio-mem, or ballooned on newer kernels.
    Offline,
    /// A page table.
    Table,
    /// Kernel objects.
    Slab,
    /// A huge page of hugetlbfs.
    Hugetlb,
    /// Anonymous memory that a process has mapped.
    Anonymous,
    /// Page cache, shared memory.
    File,
    /// Anything else: kernel text, reserved, per-CPU free lists, drivers' pages.
    Other,
}

/// Bytes of a `struct page`. With 64, a metadata frame describes 64 whole frames, and protecting it
/// affects no other frame.
pub const PAGE_BYTES: u64 = 64;

/// The words of one `struct page`, each read at most once.
pub type PageWords = [AtomicU64; PAGE_BYTES as usize / 8];

/// Where a kernel's `struct page` has its fields, and how it marks page types.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageLayout {
    lru: Field,
    pub(crate) flags: Field,
    pub(crate) mapping: Field,
    pub(crate) compound: Field,
    pub(crate) private: Field,
    pub(crate) mapcount: Field,
    max_order: u8,
    buddy: u32,
    offline: TypeTest,
    table: TypeTest,
    /// The slab flag of kernels before 6.10. 0 where slab is a page type.
    pub(crate) slab_flag: u64,
    slab: TypeTest,
    hugetlb: TypeTest,
    /// The hugetlb mark of kernels before 6.10, in the second page of a compound.
    hugetlb_second: Option<SecondTest>,
    pub(crate) head_mask: u64,
    /// What [`Guest::in_use`](crate::Guest::in_use) needs. `None` if the note lacks a part of it.
    pub(crate) usage: Option<Usage>,
    pub(crate) lru_flags: LruFlags,
}

/// Where a field is: the index of its word, and how many bits to shift the word right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Field {
    pub(crate) word: usize,
    pub(crate) shift: u32,
}

/// Test for a page type: it is set if `type & mask == value`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TypeTest {
    mask: u32,
    value: u32,
}

/// Test for hugetlbfs: a compound belongs to it if `field & mask == value` in its second page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SecondTest {
    field: Field,
    mask: u64,
    value: u64,
}

impl PageLayout {
    /// Reads the layout from the note.
    pub fn new(note: &Note) -> Result<PageLayout, Untrusted> {
        let page_bytes = note.size("page")?;
        if page_bytes != PAGE_BYTES {
            return Err(Untrusted::PageBytes(page_bytes));
        }
        let field = |name| Field::new(note, name, 8);
        let buddy = type_value(note, "PAGE_BUDDY_MAPCOUNT_VALUE")?;
        Ok(PageLayout {
            lru: links(note)?,
            flags: field("page.flags")?,
            mapping: field("page.mapping")?,
            compound: field("page.compound_head").or_else(|_| field("page.compound_info"))?,
            private: field("page.private")?,
            mapcount: Field::new(note, "page._mapcount", 4)?,
            max_order: max_order(note)?,
            buddy,
            offline: type_test(note, "PAGE_OFFLINE_MAPCOUNT_VALUE")?,
            table: table_test(buddy, note.version()),
            slab_flag: flag(note, "PG_slab").unwrap_or(0),
            slab: type_test(note, "PAGE_SLAB_MAPCOUNT_VALUE").unwrap_or(TypeTest::NEVER),
            hugetlb: type_test(note, "PAGE_HUGETLB_MAPCOUNT_VALUE").unwrap_or(TypeTest::NEVER),
            hugetlb_second: SecondTest::hugetlb(note),
            head_mask: note.number("PG_head_mask").unwrap_or(0),
            usage: Usage::new(note).ok(),
            lru_flags: LruFlags::new(note),
        })
    }

    /// The greatest order of a free block, at most [`MAX_ORDER`].
    pub fn max_order(&self) -> u8 {
        self.max_order
    }

    /// What the frame of `page` is used for. `next` is the next frame's `struct page`, where
    /// kernels before 6.10 mark hugetlb pages.
    #[inline(always)]
    pub fn decode(&self, page: &PageWords, next: Option<&PageWords>) -> PageKind {
        let kind = self.mapcount.of(page) as u32;
        if kind == self.buddy {
            return self.free(page).map_or(PageKind::Other, |order| PageKind::Free { order });
        }
        if self.compound.of(page) & 1 != 0 {
            return PageKind::Tail;
        }
        let flags = self.flags.of(page);
        if flags & self.slab_flag != 0 {
            return PageKind::Slab;
        }
        if (kind as i32) < -1 {
            return self.typed(kind);
        }
        let mapping = self.mapping.of(page);
        let head = flags & self.head_mask != 0;
        if mapping & 1 != 0 {
            // An unmapped page waits in a CPU's batch to be freed, or is in the swap cache. Not all
            // kernels keep the map count of a large folio's head.
            let mapped = kind != u32::MAX || head;
            return if mapped { PageKind::Anonymous } else { PageKind::Other };
        }
        if head && self.hugetlb_second.zip(next).is_some_and(|(test, next)| test.holds(next)) {
            return PageKind::Hugetlb;
        }
        let file = mapping & (1 << 63 | 0b11) == 1 << 63;
        if file { PageKind::File } else { PageKind::Other }
    }

    /// The block's order, if the frame is a free block's first.
    #[inline(always)]
    pub fn free_order(&self, page: &PageWords) -> Option<u8> {
        if self.mapcount.of(page) as u32 == self.buddy { self.free(page) } else { None }
    }

    /// The next (or previous) link of the list that the page is on.
    pub(crate) fn link(&self, page: &PageWords, previous: bool) -> u64 {
        let word = self.lru.word + usize::from(previous);
        Field { word, shift: 0 }.of(page)
    }

    /// Byte offset of the links.
    pub(crate) fn lru_offset(&self) -> u64 {
        8 * self.lru.word as u64
    }

    #[inline(always)]
    fn free(&self, page: &PageWords) -> Option<u8> {
        self.order(self.private.of(page))
    }

    fn order(&self, private: u64) -> Option<u8> {
        if private <= self.max_order.into() { Some(private as u8) } else { None }
    }

    fn typed(&self, kind: u32) -> PageKind {
        match () {
            () if self.table.holds(kind) => PageKind::Table,
            () if self.slab.holds(kind) => PageKind::Slab,
            () if self.offline.holds(kind) => PageKind::Offline,
            () if self.hugetlb.holds(kind) => PageKind::Hugetlb,
            () => PageKind::Other,
        }
    }
}

impl Field {
    /// Locates a field of `struct page` that is aligned to `align` bytes.
    pub(crate) fn new(note: &Note, name: &'static str, align: u64) -> Result<Field, Untrusted> {
        let offset = note.offset(name)?;
        match offset.is_multiple_of(align) && offset < PAGE_BYTES {
            true => Ok(Field { word: (offset / 8) as usize, shift: (offset % 8 * 8) as u32 }),
            false => Err(Untrusted::Absurd { what: name, value: offset }),
        }
    }

    #[inline(always)]
    pub(crate) fn of(self, page: &PageWords) -> u64 {
        // The mask changes nothing, but shows the compiler that the index is in bounds.
        page[self.word % page.len()].load(Relaxed) >> (self.shift % 64)
    }
}

impl SecondTest {
    fn hugetlb(note: &Note) -> Option<SecondTest> {
        if let Some(bit) = flag(note, "PG_hugetlb") {
            let field = Field::new(note, "page.flags", 8).ok()?;
            return Some(SecondTest { field, mask: bit, value: bit });
        }
        let field = Field::new(note, "page.compound_dtor", 1).ok()?;
        let value = note.number("HUGETLB_PAGE_DTOR").ok()?;
        Some(SecondTest { field, mask: 0xff, value })
    }

    fn holds(&self, second: &PageWords) -> bool {
        self.field.of(second) & self.mask == self.value
    }
}

impl TypeTest {
    const NEVER: TypeTest = TypeTest { mask: 0, value: 1 };

    fn holds(self, kind: u32) -> bool {
        kind & self.mask == self.value
    }

    /// A type that clears one bit of a word whose top bit stays set.
    const fn cleared(bit: u32) -> TypeTest {
        TypeTest { mask: 1 << 31 | bit, value: 1 << 31 }
    }

    /// A type that is the word's top byte.
    const fn top_byte(value: u32) -> TypeTest {
        TypeTest { mask: 0xff << 24, value }
    }
}

/// Where `lru` is. It has two links, and the second must be in the struct, too.
fn links(note: &Note) -> Result<Field, Untrusted> {
    let field = Field::new(note, "page.lru", 8)?;
    match 8 * (field.word as u64 + 2) <= PAGE_BYTES {
        true => Ok(field),
        false => Err(Untrusted::Absurd { what: "page.lru", value: 8 * field.word as u64 }),
    }
}

fn max_order(note: &Note) -> Result<u8, Untrusted> {
    let value = note.length("zone.free_area")?;
    match u8::try_from(value - 1) {
        Ok(order) if order <= MAX_ORDER => Ok(order),
        _ => Err(Untrusted::Absurd { what: "zone.free_area", value }),
    }
}

/// A page type as the kernel stores it: a negative 32-bit number.
fn type_value(note: &Note, name: &'static str) -> Result<u32, Untrusted> {
    let value = note.number(name)?;
    match i32::try_from(value as i64) {
        Ok(number) if number < -1 => Ok(number as u32),
        _ => Err(Untrusted::Absurd { what: name, value }),
    }
}

fn type_test(note: &Note, name: &'static str) -> Result<TypeTest, Untrusted> {
    let value = type_value(note, name)?;
    match is_top_byte(value) {
        true => Ok(TypeTest::top_byte(value)),
        false if (!value).is_power_of_two() => Ok(TypeTest::cleared(!value)),
        false => Err(Untrusted::Absurd { what: name, value: value.into() }),
    }
}

fn is_top_byte(value: u32) -> bool {
    value << 8 == 0
}

fn table_test(buddy: u32, version: (u32, u32)) -> TypeTest {
    match buddy {
        _ if is_top_byte(buddy) => TypeTest::top_byte(buddy.wrapping_add(2 << 24)),
        _ if !buddy == 0x80 && version < (5, 11) => TypeTest::cleared(0x400),
        _ if !buddy == 0x80 => TypeTest::cleared(0x200),
        _ => TypeTest::cleared(!buddy >> 2),
    }
}

pub(crate) fn flag(note: &Note, name: &'static str) -> Option<u64> {
    1u64.checked_shl(u32::try_from(note.number(name).ok()?).ok()?)
}

#[cfg(test)]
mod tests;
