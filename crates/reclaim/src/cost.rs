//! What it costs to evict a frame: the price of the work, and how likely a refault is.
//!
//! The prices are measured (`docs/decisions/0042-*`). The likelihoods are estimates that only have
//! to be in the right order.

use ebb_inspect::{Lru, PageKind};

use crate::uses::Uses;

/// Number of heats of a frame: from 0, not used, up.
pub const HEATS: usize = 4;

/// Microseconds to protect a frame and punch it.
const GO: u32 = 5;
/// Microseconds to seal a frame and write it in a batch.
const WRITE: u32 = 4;
/// Microseconds to read a frame from the disk block that it equals, as part of a long read.
const READ_BLOCK: u32 = 20;
/// Microseconds to read a frame from the store with neighbours, half of which are used.
const READ_STORE: u32 = 40;
/// Parts of one: likelihoods are in 64ths, costs in 64ths of a microsecond.
const PARTS: u32 = 64;
/// Greatest expected cost of a refill for a frame at rest, in parts of a microsecond.
const AT_REST_MOST: u32 = 480;
/// Turns without a use after which page cache counts as long unused.
const LONG_CACHE: u32 = 2;

/// What is known of a resident frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Page {
    /// What the guest uses it for.
    pub kind: Option<PageKind>,
    /// How the guest's kernel has it on its LRU lists.
    pub lru: Lru,
    /// The store still has its content.
    pub is_kept: bool,
    /// If it is page cache, a block of a disk may equal it.
    pub has_disk: bool,
    /// Its heat, below [`HEATS`].
    pub heat: usize,
    /// It must stay resident now, whatever it costs.
    pub stays: bool,
}

/// How busy a frame is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Work {
    /// At rest: nobody is likely to use it soon.
    AtRest,
    /// It was used recently, or may have been.
    Recent,
    /// It was used again and again.
    Busy,
}

/// What it costs to evict a frame.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Cost {
    parts: u32,
    /// How busy it is.
    pub work: Work,
    /// It is page cache, which is mostly used once.
    pub is_cache: bool,
}

impl Cost {
    /// The average of some costs, with the busiest of their `work`. `None`: there are none.
    pub(crate) fn average(costs: &[Cost]) -> Option<Cost> {
        let work = costs.iter().map(|cost| cost.work).max()?;
        let sum: u64 = costs.iter().map(|cost| u64::from(cost.parts)).sum();
        let parts = (sum / costs.len() as u64) as u32;
        Some(Cost { parts, work, is_cache: costs.iter().all(|cost| cost.is_cache) })
    }
}

impl Page {
    /// What it costs to evict it; `None`: it is never evicted.
    pub fn cost(&self, uses: Uses) -> Option<Cost> {
        if self.stays {
            return None;
        }
        if let Some(PageKind::Free { .. }) = self.kind {
            // Nobody needs its content.
            return Some(Cost { parts: PARTS * GO, work: Work::AtRest, is_cache: false });
        }
        let plain = self.likelihood(uses)?;
        let likely = (plain * self.weight() / 4).min(PARTS);
        let go = if self.goes_unwritten() { GO } else { GO + WRITE };
        let back = if self.is_block() { READ_BLOCK } else { READ_STORE };
        let work = match () {
            // Heat and list tell which frame of a kind to evict first, not that all of its kind are
            // busy.
            () if plain * back <= AT_REST_MOST => Work::AtRest,
            () if uses.is_often() => Work::Busy,
            () => Work::Recent,
        };
        Some(Cost { parts: PARTS * go + likely * back, work, is_cache: self.is_cache() })
    }

    /// Whether it is evicted without being written, as far as that is known before.
    pub fn goes_unwritten(&self) -> bool {
        matches!(self.kind, Some(PageKind::Free { .. })) || self.is_kept || self.is_block()
    }

    /// Whether it is likely to equal a block of a disk.
    fn is_block(&self) -> bool {
        self.has_disk && self.is_cache() && !self.lru.dirty
    }

    fn is_cache(&self) -> bool {
        self.kind == Some(PageKind::File) && !self.lru.swap_backed
    }

    /// How likely it is to be used before long, in 64ths, by when it was used. Page cache is mostly
    /// read once. A use of the kernel's own memory counts twice: more waits for it than for any
    /// other memory. `None`: it is never evicted.
    fn likelihood(&self, uses: Uses) -> Option<u32> {
        Some(match self.kind {
            Some(PageKind::Table) => return None,
            _ if self.is_cache() => match () {
                () if uses.is_often() => 56,
                () if uses.is_now() => 10,
                () if uses.turns_at_rest() < LONG_CACHE => 2,
                () => 1,
            },
            Some(PageKind::Anonymous | PageKind::File) | None => uses.likelihood(1),
            // The guest gave it away, for example to a balloon.
            Some(PageKind::Offline) => 1,
            Some(_) => uses.likelihood(2),
        })
    }

    /// Factor of the likelihood by what else is known, in quarters. What is unknown adds nothing.
    fn weight(&self) -> u32 {
        let lru = &self.lru;
        let listed = match () {
            () if lru.active || lru.unevictable => 8,
            () if lru.referenced || lru.workingset => 6,
            () => 4,
        };
        // Heat doubles it at most.
        listed + listed * self.heat.min(HEATS - 1) as u32 / (HEATS as u32 - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PageKind::{Anonymous, File, Free, Slab, Table};

    fn page(kind: PageKind) -> Page {
        Page { kind: Some(kind), has_disk: true, ..Page::default() }
    }

    fn in_order(pages: &[(Page, Uses)]) {
        let costs: Vec<Cost> = pages.iter().map(|(page, used)| page.cost(*used).unwrap()).collect();
        for (at, pair) in costs.windows(2).enumerate() {
            assert!(pair[0] < pair[1], "{:?} before {:?}: {pair:?}", pages[at], pages[at + 1]);
        }
    }

    #[test]
    fn frames_go_in_the_order_of_their_cost() {
        in_order(&[
            (page(Free { order: 0 }), Uses::OFTEN),
            (page(File), Uses::unused_for(3)),
            (page(File), Uses::unused_for(1)),
            (page(File), Uses::NOW),
            (page(Anonymous), Uses::unused_for(3)),
            (page(Anonymous), Uses::unused_for(1)),
            (page(Anonymous), Uses::BEFORE),
            (page(File), Uses::OFTEN),
            (page(Anonymous), Uses::NOW),
            (page(Slab), Uses::NOW),
            (page(Slab), Uses::OFTEN),
        ]);
        assert_eq!(page(Table).cost(Uses::unused_for(100)), None);
        assert_eq!(Page { stays: true, ..page(File) }.cost(Uses::unused_for(100)), None);
        // If nothing is known of it, it costs what memory of a process does.
        assert_eq!(Page::default().cost(Uses::NOW), page(Anonymous).cost(Uses::NOW));
    }

    #[test]
    fn frames_that_need_no_write_go_first() {
        let kept = Page { is_kept: true, ..page(Anonymous) };
        in_order(&[(kept, Uses::unused_for(1)), (page(Anonymous), Uses::unused_for(1))]);
        let block = page(File);
        let dirty = Page { lru: Lru { dirty: true, ..Lru::default() }, ..block };
        let no_disk = Page { has_disk: false, ..block };
        in_order(&[(block, Uses::unused_for(1)), (dirty, Uses::unused_for(1))]);
        assert_eq!(no_disk.cost(Uses::unused_for(1)), dirty.cost(Uses::unused_for(1)));
        let without_room = [kept, block, page(Free { order: 3 }), dirty, no_disk, page(Anonymous)];
        assert_eq!(
            without_room.map(|page| page.goes_unwritten()),
            [true, true, true, false, false, false]
        );
        // Shared memory equals no disk block, and is not read just once.
        let shared = Page { lru: Lru { swap_backed: true, ..Lru::default() }, ..block };
        assert_eq!(shared.cost(Uses::NOW), page(Anonymous).cost(Uses::NOW));
    }

    #[test]
    fn a_write_spared_does_not_pay_for_a_read() {
        let kept = Page { is_kept: true, ..page(Anonymous) };
        in_order(&[(page(Anonymous), Uses::unused_for(1)), (kept, Uses::OFTEN)]);
    }

    #[test]
    fn frames_that_the_guest_counts_as_used_stay_longer() {
        let with = |lru| Page { lru, ..page(File) };
        let referenced = with(Lru { referenced: true, ..Lru::default() });
        let active = with(Lru { active: true, referenced: true, ..Lru::default() });
        for used in [Uses::unused_for(1), Uses::NOW] {
            in_order(&[(page(File), used), (referenced, used), (active, used)]);
        }
        assert_eq!(
            with(Lru { workingset: true, ..Lru::default() }).cost(Uses::NOW),
            referenced.cost(Uses::NOW)
        );
        assert_eq!(
            with(Lru { unevictable: true, ..Lru::default() }).cost(Uses::NOW),
            active.cost(Uses::NOW)
        );
    }

    #[test]
    fn among_equals_the_coldest_goes_first() {
        let hot = |heat| Page { heat, ..page(Anonymous) };
        in_order(&[0, 1, 2, 3].map(|heat| (hot(heat), Uses::BEFORE)));
        // A heat beyond the last counts as the last. The coldest in use comes after the hottest at
        // rest.
        assert_eq!(hot(9).cost(Uses::NOW), hot(3).cost(Uses::NOW));
        in_order(&[(hot(3), Uses::unused_for(1)), (hot(0), Uses::NOW)]);
    }

    #[test]
    fn long_unused_frames_of_the_kernel_cost_as_much_as_others() {
        assert_eq!(page(Slab).cost(Uses::unused_for(7)), page(Anonymous).cost(Uses::unused_for(7)));
        in_order(&[
            (page(Slab), Uses::unused_for(7)),
            (page(Anonymous), Uses::unused_for(2)),
            (page(Slab), Uses::unused_for(2)),
            (page(Anonymous), Uses::NOW),
        ]);
    }

    /// Kernels without multi-generational LRU have most of what was used twice on their active
    /// list.
    #[test]
    fn memory_at_rest_is_so_on_any_list() {
        let lru = Lru { active: true, referenced: true, swap_backed: true, ..Lru::default() };
        for used in [Uses::unused_for(1), Uses::BEFORE] {
            let active = Page { lru, heat: 3, ..page(Anonymous) };
            assert_eq!(active.cost(used).unwrap().work, Work::AtRest, "{used:?}");
            in_order(&[(page(Anonymous), used), (active, used)]);
        }
    }

    #[test]
    fn frames_in_a_balloon_go_before_unused_ones() {
        in_order(&[(page(PageKind::Offline), Uses::OFTEN), (page(Anonymous), Uses::unused_for(3))]);
        assert!(!page(PageKind::Offline).goes_unwritten());
    }

    #[test]
    fn memory_at_rest_differs_from_memory_in_use() {
        let work = |kind, used| page(kind).cost(used).unwrap().work;
        let at_rest = [(File, Uses::NOW), (Anonymous, Uses::BEFORE), (Slab, Uses::unused_for(7))];
        assert!(at_rest.iter().all(|&(kind, used)| work(kind, used) == Work::AtRest));
        let recent = [(Anonymous, Uses::NOW), (Slab, Uses::BEFORE), (Slab, Uses::NOW)];
        assert!(recent.iter().all(|&(kind, used)| work(kind, used) == Work::Recent));
        assert_eq!([work(File, Uses::OFTEN), work(Anonymous, Uses::OFTEN)], [Work::Busy; 2]);
    }
}
