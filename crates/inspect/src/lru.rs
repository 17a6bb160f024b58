//! How the guest's own reclaim sees a page.
//!
//! The note gives the places of three flags. If they match one of the two orders that kernels have
//! had, the places of the others are known, too:
//!
//! | kernel | `PG_lru` | `PG_head` | referenced | dirty | active | workingset |
//! |---|---|---|---|---|---|---|
//! | 5.10 - 6.5 | 4 | 16 | 1 | 3 | 5 | 6 |
//! | 6.6 on | 5 | 6 | 2 | 4 | 8 | 9 |
//!
//! `PG_unevictable` follows `PG_swapbacked` in all of them.

use crate::page::{PageWords, flag};
use crate::{Note, PageLayout};

/// What the flags of a page on an LRU list tell. A flag whose place is not known is `false`, and so
/// are all flags of a page on no list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lru {
    /// The page is on the active list, of pages that are used again and again.
    pub active: bool,
    /// The page was used since reclaim last looked at it.
    pub referenced: bool,
    /// The page was active, or refaulted soon, before it left the guest's memory.
    pub workingset: bool,
    /// The page must never leave the guest's memory: somebody has locked it.
    pub unevictable: bool,
    /// The page goes to swap, not to a file: anonymous or shared memory.
    pub swap_backed: bool,
    /// The page was written after its file was.
    pub dirty: bool,
}

impl Lru {
    pub(crate) const NONE: Lru = Lru {
        active: false,
        referenced: false,
        workingset: false,
        unevictable: false,
        swap_backed: false,
        dirty: false,
    };
}

/// Where these flags are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LruFlags {
    lru: u64,
    swap_backed: u64,
    /// 0 if its place is not known.
    active: u64,
    referenced: u64,
    workingset: u64,
    dirty: u64,
}

impl LruFlags {
    pub(crate) fn new(note: &Note) -> LruFlags {
        let Some(lru) = flag(note, "PG_lru") else { return LruFlags::default() };
        let swap_backed = flag(note, "PG_swapbacked").unwrap_or(0);
        let known = LruFlags { lru, swap_backed, ..LruFlags::default() };
        let at = |[referenced, dirty, active, workingset]: [u32; 4]| LruFlags {
            referenced: 1 << referenced,
            dirty: 1 << dirty,
            active: 1 << active,
            workingset: 1 << workingset,
            ..known
        };
        match (lru.trailing_zeros(), note.number("PG_head_mask")) {
            (4, Ok(head)) if head == 1 << 16 => at([1, 3, 5, 6]),
            (5, Ok(head)) if head == 1 << 6 => at([2, 4, 8, 9]),
            _ => known,
        }
    }
}

impl PageLayout {
    /// Decodes the LRU flags of a compound's head, or of a page that is not part of a compound.
    pub(crate) fn lru_of(&self, page: &PageWords) -> Lru {
        let (at, flags) = (self.lru_flags, self.flags.of(page));
        if flags & at.lru == 0 {
            return Lru::NONE;
        }
        let has = |flag: u64| flags & flag != 0;
        Lru {
            active: has(at.active),
            referenced: has(at.referenced),
            workingset: has(at.workingset),
            unevictable: has(at.swap_backed << 1),
            swap_backed: has(at.swap_backed),
            dirty: has(at.dirty),
        }
    }
}
