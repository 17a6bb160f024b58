//! What the guest's kernel counts of its memory: the figures behind its `/proc/meminfo`.
//!
//! Each zone has counters whose place the note gives. They tell how much memory there is, how much
//! is free, and how much is on the LRU lists. A node has more (slabs, page cache), and no note gives
//! their place. But the node's first five counters are its LRU lists, too, so they nearly equal
//! the sums over its zones, and that identifies the place.
//!
//! Linux keeps a part of each change in per-CPU counters: up to 125 frames for each CPU, zone and
//! counter. `/proc/meminfo` lacks the same part.

use ebb_units::{FRAME_BYTES, Gpa};

use crate::zones::Node;
use crate::{Guest, GuestMemory, MAX_ORDER};

/// Counters of LRU lists: inactive and active anonymous memory, inactive and active page cache, and
/// memory that must stay (`enum lru_list`).
const LRU_LISTS: usize = 5;
/// Which of them is the page cache that was not used for long.
const INACTIVE_FILE: usize = 2;
/// From a zone's `NR_FREE_PAGES` to its first LRU counter: one, or two since Linux 6.17, which also
/// counts whole free blocks.
const LRU_AFTER_FREE: [u64; 2] = [1, 2];
/// Places of a node's counters behind its LRU lists (`enum node_stat_item`), the same in Linux 5.10
/// to 7.3.
const SLAB_RECLAIMABLE: u64 = 5;
const SLAB_UNRECLAIMABLE: u64 = 6;
const ANON_MAPPED: u64 = 17;
const FILE_PAGES: u64 = 19;
/// Words of a node's counters that are read.
const NODE_WORDS: u64 = FILE_PAGES + 1;
/// Greatest size of `struct pglist_data` behind its zones. Kernels have 1 to 3 KiB there.
const SEARCHED_BYTES_MAX: u64 = 64 << 10;
/// Least memory on LRU lists from which the place can be told, in frames: 2 MiB.
const LRU_FRAMES_LEAST: u64 = 512;
/// Divisor of the frames on LRU lists that gives the most by which a node and its zones may differ.
const APART_PART: u64 = 8;
/// Difference that is always allowed, in frames: what some CPUs have not added yet.
const APART_FRAMES: u64 = 1024;

/// Where a kernel keeps the counters of which the note gives no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterPlaces {
    /// From a zone's free counter to its LRU counters, in words.
    lru_after_free: u64,
    /// Offset of a node's counters in its `struct pglist_data`.
    node_counters: u64,
}

/// A kernel's own counts of its memory, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// All memory that the kernel manages: meminfo's MemTotal.
    pub total_bytes: u64,
    /// Free memory: MemFree. Memory on per-CPU lists is not in it.
    pub free_bytes: u64,
    /// Free memory by the order of its blocks.
    pub free_blocks: [u64; MAX_ORDER as usize + 1],
    /// Page cache, with shared memory and buffers: Cached, Buffers and SwapCached.
    pub cache_bytes: u64,
    /// The part of the page cache that was not used for long: Inactive(file).
    pub cold_cache_bytes: u64,
    /// Mapped anonymous memory: AnonPages.
    pub anonymous_bytes: u64,
    /// Kernel objects: Slab.
    pub slab_bytes: u64,
}

type LruFrames = [u64; LRU_LISTS];

impl Guest {
    /// Finds the counters of which the note gives no place. `None`: the guest has too little memory
    /// in use, as early in its boot, or has counters of an unknown order.
    ///
    /// Reads some hundred words.
    pub fn counter_places(&self, mem: &dyn GuestMemory) -> Option<CounterPlaces> {
        let found = self.zones().nodes.iter().flat_map(|node| {
            LRU_AFTER_FREE.into_iter().filter_map(|after| self.places_in(mem, node, after))
        });
        found.min_by_key(|(apart, _)| *apart).map(|(_, places)| places)
    }

    /// Returns the best place in one node, and how far its counters are from the zones'.
    fn places_in(
        &self,
        mem: &dyn GuestMemory,
        node: &Node,
        lru_after_free: u64,
    ) -> Option<(u64, CounterPlaces)> {
        let zones = self.lru_of_zones(mem, node.index, lru_after_free)?;
        if zones.iter().sum::<u64>() < LRU_FRAMES_LEAST {
            return None;
        }
        let (from, end) = self.node_counters_within()?;
        let base = self.tables().translate(mem, node.va)?;
        let fits = |at: u64| {
            let lru = lru_at(mem, base.checked_add(at)?)?;
            let places = CounterPlaces { lru_after_free, node_counters: at };
            Some((apart(&lru, &zones)?, places))
        };
        (from..end).step_by(8).filter_map(fits).min_by_key(|(apart, _)| *apart)
    }

    /// The offsets at which a node's counters may begin.
    fn node_counters_within(&self) -> Option<(u64, u64)> {
        let (note, words) = (self.note(), NODE_WORDS * 8);
        let from = note.offset("pglist_data.nr_zones").ok()?.next_multiple_of(8);
        let size = note.size("pglist_data").ok()?;
        Some((from, size.min(from + SEARCHED_BYTES_MAX).checked_sub(words)?))
    }

    /// Sums the LRU counters of a node's zones. `None`: one cannot be read, or there is no zone.
    fn lru_of_zones(&self, mem: &dyn GuestMemory, node: u32, after: u64) -> Option<LruFrames> {
        let mut sums = LruFrames::default();
        let mut zones = self.zones().iter().filter(|zone| zone.node == node).peekable();
        zones.peek()?;
        for zone in zones {
            let lru =
                lru_at(mem, zone.gpa.checked_add(self.zones().fields.free_pages + 8 * after)?)?;
            for (sum, frames) in sums.iter_mut().zip(lru) {
                *sum = sum.saturating_add(frames);
            }
        }
        Some(sums)
    }

    /// Reads the kernel's counters. `None`: a word cannot be read, or the counts contradict each
    /// other, as they do where `places` are of another kernel.
    pub fn counters(&self, mem: &dyn GuestMemory, places: &CounterPlaces) -> Option<Counters> {
        let mut counters = Counters::default();
        self.add_zones(mem, &mut counters)?;
        for node in &self.zones().nodes {
            // A node without zones has no memory.
            let Some(zones) = self.lru_of_zones(mem, node.index, places.lru_after_free) else {
                continue;
            };
            let base = self.tables().translate(mem, node.va)?.checked_add(places.node_counters)?;
            apart(&lru_at(mem, base)?, &zones)?;
            let bytes = |index: u64| Some(frames(mem.word(Gpa(base.0 + 8 * index))?) * FRAME_BYTES);
            add(&mut counters.cold_cache_bytes, zones[INACTIVE_FILE].saturating_mul(FRAME_BYTES));
            add(&mut counters.slab_bytes, bytes(SLAB_RECLAIMABLE)?);
            add(&mut counters.slab_bytes, bytes(SLAB_UNRECLAIMABLE)?);
            add(&mut counters.anonymous_bytes, bytes(ANON_MAPPED)?);
            add(&mut counters.cache_bytes, bytes(FILE_PAGES)?);
        }
        let parts = [
            counters.free_bytes,
            counters.cache_bytes,
            counters.anonymous_bytes,
            counters.slab_bytes,
        ];
        let sum = parts.iter().fold(0_u64, |sum, part| sum.saturating_add(*part));
        let slack = APART_FRAMES * FRAME_BYTES + counters.total_bytes / 64;
        (sum <= counters.total_bytes.saturating_add(slack)).then_some(counters)
    }

    fn add_zones(&self, mem: &dyn GuestMemory, counters: &mut Counters) -> Option<()> {
        let fields = self.zones().fields;
        // `managed_pages` stands before `spanned_pages` in all kernels known.
        let managed = fields.spanned.checked_sub(8)?;
        for zone in self.zones().iter() {
            let word = |offset: u64| mem.word(zone.gpa.checked_add(offset)?).map(frames);
            let (managed, spanned) = (word(managed)?, word(fields.spanned)?);
            if managed > spanned {
                return None;
            }
            add(&mut counters.total_bytes, managed * FRAME_BYTES);
            add(&mut counters.free_bytes, word(fields.free_pages)? * FRAME_BYTES);
            let count = fields.free_list + 16 * fields.migrate_types;
            for (order, blocks) in (0..).zip(&mut counters.free_blocks) {
                *blocks += word(fields.free_area + fields.free_area_bytes * order + count)?;
            }
        }
        Some(())
    }
}

impl Counters {
    /// Free memory in blocks of at least this order, in bytes.
    pub fn free_in_blocks(&self, least_order: u8) -> u64 {
        let blocks = self.free_blocks.iter().enumerate().skip(least_order.into());
        let bytes = blocks.map(|(order, &count)| count.saturating_mul(FRAME_BYTES << order));
        bytes.fold(0, u64::saturating_add)
    }
}

fn lru_at(mem: &dyn GuestMemory, at: Gpa) -> Option<LruFrames> {
    let mut lru = LruFrames::default();
    for (index, counter) in (0..).zip(&mut lru) {
        *counter = frames(mem.word(at.checked_add(8 * index)?)?);
    }
    Some(lru)
}

fn add(sum: &mut u64, bytes: u64) {
    *sum = sum.saturating_add(bytes);
}

/// A counter's value. A negative one is a CPU's debt, and counts as 0. None is more than a guest
/// can have, so that bytes of them do not overflow.
fn frames(word: u64) -> u64 {
    (word as i64).clamp(0, 1 << 40) as u64
}

/// How far two counts of the same lists are apart. `None`: too far.
fn apart(node: &LruFrames, zones: &LruFrames) -> Option<u64> {
    let differences = node.iter().zip(zones).map(|(node, zone)| node.abs_diff(*zone));
    let (apart, all) = (differences.sum::<u64>(), zones.iter().sum::<u64>());
    (apart <= (all / APART_PART).max(APART_FRAMES.min(all / 2))).then_some(apart)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_differ_by_what_cpus_keep_are_the_same() {
        let zones = [9_000, 1_000, 4_000, 2_000, 10];
        assert_eq!(apart(&[9_100, 900, 4_000, 2_000, 0], &zones), Some(210));
        assert_eq!(apart(&zones, &zones), Some(0));
        assert_eq!(apart(&[0, 9_000, 1_000, 4_000, 2_000], &zones), None);
        assert_eq!(apart(&[0; 5], &[400, 100, 200, 50, 0]), None);
    }

    #[test]
    fn a_debt_counts_as_nothing_and_absurd_counts_are_bounded() {
        assert_eq!(frames(-5_i64 as u64), 0);
        assert_eq!(frames(i64::MAX as u64), 1 << 40);
    }

    #[test]
    fn free_blocks_add_up_from_an_order_on() {
        let mut counters = Counters::default();
        counters.free_blocks[8] = 100;
        counters.free_blocks[9] = 3;
        counters.free_blocks[10] = 2;
        assert_eq!(counters.free_in_blocks(9), (3 * 2 + 2 * 4) << 20);
    }
}
