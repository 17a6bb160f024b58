//! Which blocks are plugged, one bit for each. One thread at a time changes them; any thread may
//! read them.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use crate::request::BlockState;

const WORD_BITS: u64 = u64::BITS as u64;

/// One bit for each block, set if the block is plugged.
pub(crate) struct BlockMap {
    words: Vec<AtomicU64>,
    blocks: u64,
}

impl BlockMap {
    /// Makes a map with all blocks unplugged.
    pub(crate) fn new(blocks: u64) -> BlockMap {
        let words = (0..word_count(blocks)).map(|_| AtomicU64::new(0)).collect();
        BlockMap { words, blocks }
    }

    /// Loads what [`BlockMap::words`] returned. Returns `None` if that has another number of
    /// blocks.
    pub(crate) fn load(&self, words: &[u64]) -> Option<()> {
        let rest = self.blocks % WORD_BITS;
        let beyond = if rest == 0 { 0 } else { !0u64 << rest };
        let fits = words.len() == self.words.len();
        if !fits || words.last().is_some_and(|last| last & beyond != 0) {
            return None;
        }
        self.words.iter().zip(words).for_each(|(word, &value)| word.store(value, Release));
        Some(())
    }

    /// Returns the bits. Block 0 is the lowest bit of the first word.
    pub(crate) fn words(&self) -> Vec<u64> {
        self.words.iter().map(|word| word.load(Acquire)).collect()
    }

    pub(crate) fn is_plugged(&self, block: u64) -> bool {
        let word = self.words.get((block / WORD_BITS) as usize);
        word.is_some_and(|word| word.load(Acquire) >> (block % WORD_BITS) & 1 == 1)
    }

    /// Returns the state of the blocks in `range`.
    pub(crate) fn state(&self, range: &Range<u64>) -> BlockState {
        let (mut all, mut any) = (true, false);
        for (word, mask) in self.masked(range) {
            let bits = word.load(Acquire) & mask;
            (all, any) = (all && bits == mask, any || bits != 0);
        }
        match (all, any) {
            (true, _) => BlockState::Plugged,
            (_, false) => BlockState::Unplugged,
            _ => BlockState::Mixed,
        }
    }

    pub(crate) fn set(&self, range: &Range<u64>, plugged: bool) {
        for (word, mask) in self.masked(range) {
            match plugged {
                true => word.fetch_or(mask, AcqRel),
                false => word.fetch_and(!mask, AcqRel),
            };
        }
    }

    /// Returns how many blocks are plugged.
    pub(crate) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Acquire).count_ones())).sum()
    }

    /// Returns the longest runs of blocks that are all plugged, or all unplugged.
    pub(crate) fn runs(&self, plugged: bool) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        let mut at = 0;
        while let Some(first) = self.next(at, plugged) {
            at = self.next(first, !plugged).unwrap_or(self.blocks);
            runs.push(first..at);
        }
        runs
    }

    /// Returns the first block from `from` on that is plugged, or unplugged.
    fn next(&self, from: u64, plugged: bool) -> Option<u64> {
        let (index, skip) = ((from / WORD_BITS) as usize, from % WORD_BITS);
        let mut mask = !0u64 << skip;
        for (number, word) in self.words.iter().enumerate().skip(index) {
            let bits = word.load(Acquire);
            let wanted = if plugged { bits } else { !bits } & mask;
            if wanted != 0 {
                let block = number as u64 * WORD_BITS + u64::from(wanted.trailing_zeros());
                return Some(block).filter(|&block| block < self.blocks);
            }
            mask = !0;
        }
        None
    }

    /// Returns the words that `range` touches, each with the mask of its bits in the range.
    fn masked(&self, range: &Range<u64>) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let (start, end) = (range.start, range.end.min(self.blocks));
        let words = if start < end { start / WORD_BITS..word_count(end) } else { 0..0 };
        words.filter_map(move |index| {
            let base = index * WORD_BITS;
            let low = !0u64 << start.saturating_sub(base);
            let high = !0u64 >> (WORD_BITS - (end - base).min(WORD_BITS));
            self.words.get(index as usize).map(|word| (word, low & high))
        })
    }
}

pub(crate) fn word_count(blocks: u64) -> u64 {
    blocks.div_ceil(WORD_BITS)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_of_another_size_are_refused() {
        let map = BlockMap::new(65);
        assert!(map.load(&[1]).is_none());
        assert!(map.load(&[1, 2]).is_none());
        assert!(map.load(&[1, 1, 0]).is_none());
        assert!(map.load(&[1 << 63, 1]).is_some());
        assert_eq!(map.runs(true), vec![63..65]);
        assert!(BlockMap::new(64).load(&[!0]).is_some());
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_blocks(
            blocks in 1u64..300,
            changes in prop::collection::vec((0u64..300, 0u64..200, any::<bool>()), 1..20),
        ) {
            let map = BlockMap::new(blocks);
            let mut model = BTreeSet::new();
            for (start, count, plugged) in changes {
                let range = start.min(blocks)..(start + count).min(blocks);
                map.set(&range, plugged);
                for block in range.clone() {
                    if plugged { model.insert(block) } else { model.remove(&block) };
                }
                let inside = range.clone().filter(|block| model.contains(block)).count() as u64;
                let state = match inside {
                    _ if inside == range.end - range.start => BlockState::Plugged,
                    0 => BlockState::Unplugged,
                    _ => BlockState::Mixed,
                };
                prop_assert_eq!(map.state(&range), state);
                let any = 0..blocks;
                prop_assert_eq!(map.count(), model.len() as u64);
                for wanted in [true, false] {
                    let listed: Vec<u64> = map.runs(wanted).into_iter().flatten().collect();
                    let expected: Vec<u64> =
                        any.clone().filter(|block| model.contains(block) == wanted).collect();
                    prop_assert_eq!(listed, expected);
                }
                prop_assert!(any.clone().all(|b| map.is_plugged(b) == model.contains(&b)));
                let again = BlockMap::new(blocks);
                prop_assert!(again.load(&map.words()).is_some());
                prop_assert_eq!(again.runs(true), map.runs(true));
            }
        }
    }
}
