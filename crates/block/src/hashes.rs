//! Finds the block of a disk that equals a page, by keyed hashes of the blocks that moved.
//!
//! Each block takes 32 bytes: an entry of 24 in a table by hash, and one of 8 in a table by
//! block, which finds the entry of a block that is overwritten. Both tables have sets of eight.
//! When a set is full, the entry that was seen longest ago is removed from both tables.
//!
//! The hash has 128 bits and is keyed with a secret (`ebb_digest`), so a guest can neither make
//! two contents collide nor meet a collision by chance.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_digest::{Digest, DigestKey};

use crate::observer::Block;

const WAYS: usize = 8;
/// Bits of a block number in a packed word.
const BLOCK_BITS: u32 = 40;
/// Bound on the number of sets: a packed word has 24 other bits.
const SETS_MAX: u64 = 1 << (64 - BLOCK_BITS);
/// Insertions that make a tick of the clock by which entries age.
const TICK: u64 = 256;

/// An entry by hash. The lower 40 bits of the word are the block, the upper ones the tick when it
/// was last seen. A hash of zero, which no digest has, means no entry.
#[derive(Clone, Copy, Default)]
struct Entry {
    hash: Digest,
    block_and_tick: u64,
}

impl Entry {
    fn is_used(self) -> bool {
        self.hash != [0, 0]
    }

    fn block(self) -> u64 {
        self.block_and_tick & ((1 << BLOCK_BITS) - 1)
    }

    fn tick(self) -> u64 {
        self.block_and_tick >> BLOCK_BITS
    }
}

/// The blocks of all disks of a VM whose content is known.
pub struct Hashes {
    key: Arc<DigestKey>,
    tables: Mutex<Tables>,
}

/// Each entry by hash has one by block, and the other way round.
struct Tables {
    by_hash: Vec<Entry>,
    /// Packed words: the block below, the set of its hash plus one above. 0 means none.
    by_block: Vec<u64>,
    sets: u64,
    used: u64,
    inserted: u64,
}

impl Hashes {
    /// Makes tables for about `blocks` blocks. They use memory only as they fill.
    pub fn new(blocks: u64, key: Arc<DigestKey>) -> Hashes {
        let sets = blocks.div_ceil(WAYS as u64).next_power_of_two().clamp(1, SETS_MAX / 2);
        let count = sets as usize * WAYS;
        let (by_hash, by_block) = (vec![Entry::default(); count], vec![0; count]);
        let tables = Tables { by_hash, by_block, sets, used: 0, inserted: 0 };
        Hashes { key, tables: Mutex::new(tables) }
    }

    /// Records that `block` has this content now.
    pub fn insert(&self, block: u64, content: &Block) {
        if block >> BLOCK_BITS == 0 {
            let hash = self.key.digest(content);
            self.tables().insert(block, hash);
        }
    }

    /// Forgets what is known of these blocks.
    pub fn forget(&self, blocks: Range<u64>) {
        let mut tables = self.tables();
        if blocks.end.saturating_sub(blocks.start) > tables.by_hash.len() as u64 {
            return tables.forget_where(|block| blocks.contains(&block));
        }
        blocks.for_each(|block| tables.forget(block));
    }

    /// Returns a block whose content has this digest, made with the same key.
    pub fn find(&self, digest: &Digest) -> Option<u64> {
        self.tables().find(*digest)
    }

    /// Returns the number of blocks known.
    pub fn used(&self) -> u64 {
        self.tables().used
    }

    /// Locks the tables. They are consistent between two calls. A panic leaves at worst a block
    /// that is not found.
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn insert(&mut self, block: u64, hash: Digest) {
        self.forget(block);
        self.inserted += 1;
        let tick = self.inserted / TICK % (1 << (64 - BLOCK_BITS));
        let set = self.set_of_hash(hash);
        let age = |entry: &Entry| tick.wrapping_sub(entry.tick()) % (1 << (64 - BLOCK_BITS));
        let ways = set * WAYS..(set + 1) * WAYS;
        let oldest = { ways }.max_by_key(|&at| match self.by_hash[at].is_used() {
            true => age(&self.by_hash[at]),
            false => u64::MAX,
        });
        let Some(at) = oldest else { return };
        if self.by_hash[at].is_used() {
            self.forget(self.by_hash[at].block());
        }
        self.make_room(block);
        self.by_hash[at] = Entry { hash, block_and_tick: tick << BLOCK_BITS | block };
        if let Some(at) = self.free_by_block(block) {
            self.by_block[at] = pack(block, set);
            self.used += 1;
        } else {
            self.by_hash[at] = Entry::default();
        }
    }

    /// Makes a place by block for `block`. If none is free, it forgets the block whose entry is
    /// oldest.
    fn make_room(&mut self, block: u64) {
        if self.free_by_block(block).is_some() {
            return;
        }
        let now = self.inserted / TICK;
        let blocks: Vec<u64> =
            self.ways_of_block(block).map(|at| unpack(self.by_block[at]).0).collect();
        let tick = |block: u64| self.entry_of(block).map_or(0, |at| self.by_hash[at].tick());
        let oldest = blocks.into_iter().max_by_key(|&block| now.wrapping_sub(tick(block)));
        oldest.into_iter().for_each(|block| self.forget(block));
    }

    fn forget(&mut self, block: u64) {
        let Some(place) = self.place_of(block) else { return };
        if let Some(at) = self.entry_of(block) {
            self.by_hash[at] = Entry::default();
        }
        self.by_block[place] = 0;
        self.used -= 1;
    }

    fn forget_where(&mut self, matches: impl Fn(u64) -> bool) {
        let blocks: Vec<u64> = { self.by_hash.iter() }
            .filter(|entry| entry.is_used() && matches(entry.block()))
            .map(|entry| entry.block())
            .collect();
        blocks.into_iter().for_each(|block| self.forget(block));
    }

    fn find(&self, hash: Digest) -> Option<u64> {
        let set = self.set_of_hash(hash);
        let ways = self.by_hash.get(set * WAYS..(set + 1) * WAYS)?;
        ways.iter().find(|entry| entry.hash == hash).map(|entry| entry.block())
    }

    /// Returns where the block's entry by hash is.
    fn entry_of(&self, block: u64) -> Option<usize> {
        let (_, set) = unpack(self.by_block[self.place_of(block)?]);
        (set * WAYS..(set + 1) * WAYS)
            .find(|&at| self.by_hash[at].is_used() && self.by_hash[at].block() == block)
    }

    fn place_of(&self, block: u64) -> Option<usize> {
        self.ways_of_block(block)
            .find(|&at| self.by_block[at] != 0 && unpack(self.by_block[at]).0 == block)
    }

    fn free_by_block(&self, block: u64) -> Option<usize> {
        self.ways_of_block(block).find(|&at| self.by_block[at] == 0)
    }

    fn ways_of_block(&self, block: u64) -> impl Iterator<Item = usize> + use<> {
        // Neighbours on disk go to different sets.
        let set = (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % self.sets;
        set as usize * WAYS..(set as usize + 1) * WAYS
    }

    fn set_of_hash(&self, hash: Digest) -> usize {
        ((hash[0] >> 1) % self.sets) as usize
    }
}

fn pack(block: u64, set: usize) -> u64 {
    (set as u64 + 1) << BLOCK_BITS | block
}

fn unpack(packed: u64) -> (u64, usize) {
    (packed & ((1 << BLOCK_BITS) - 1), (packed >> BLOCK_BITS).saturating_sub(1) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn new(blocks: u64) -> Hashes {
        Hashes::new(blocks, Arc::new(DigestKey::new(&[7; 32])))
    }

    impl Hashes {
        fn find_content(&self, content: &Block) -> Option<u64> {
            self.find(&self.key.digest(content))
        }
    }

    fn content(seed: u64) -> Block {
        let mut content = [0; 4096];
        content[..8].copy_from_slice(&seed.to_ne_bytes());
        content
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64, u64),
        Forget(Range<u64>),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..200u64, 0..50u64).prop_map(|(block, seed)| Step::Insert(block, seed)),
            1 => (0..200u64, 0..9u64).prop_map(|(start, count)| Step::Forget(start..start + count)),
            1 => (0..9u64).prop_map(|start| Step::Forget(start..1 << 41)),
        ]
    }

    proptest! {
        /// All that is found is true. Of few blocks all are found.
        #[test]
        fn finds_only_what_is_there(
            steps in prop::collection::vec(step(), 1..400),
            room in prop_oneof![Just(8u64), Just(64), Just(4096)],
        ) {
            let hashes = new(room);
            let mut disk: HashMap<u64, u64> = HashMap::new();
            let last = steps.len() - 1;
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(block, seed) => {
                        hashes.insert(block, &content(seed));
                        disk.insert(block, seed);
                        prop_assert!(room < 4096 || hashes.find_content(&content(seed)).is_some());
                    }
                    Step::Forget(blocks) => {
                        hashes.forget(blocks.clone());
                        disk.retain(|block, _| !blocks.contains(block));
                    }
                }
                // Each look hashes 50 blocks.
                if number % 16 != 0 && number != last {
                    continue;
                }
                for seed in 0..50 {
                    if let Some(block) = hashes.find_content(&content(seed)) {
                        prop_assert_eq!(disk.get(&block), Some(&seed));
                    }
                }
                let used = hashes.used();
                prop_assert!(used <= disk.len() as u64);
                let tables = hashes.tables();
                prop_assert_eq!(tables.by_hash.iter().filter(|e| e.is_used()).count() as u64, used);
                prop_assert_eq!(tables.by_block.iter().filter(|p| **p != 0).count() as u64, used);
            }
        }
    }

    #[test]
    fn an_entry_and_its_place_take_32_bytes() {
        assert_eq!(size_of::<Entry>() + size_of::<u64>(), 32);
    }

    #[test]
    fn blocks_that_were_seen_last_stay() {
        let hashes = new(1 << 10);
        (0..1 << 14).for_each(|block| hashes.insert(block, &content(block + 1)));
        let kept = |blocks: Range<u64>| {
            blocks.filter(|block| hashes.find_content(&content(block + 1)) == Some(*block)).count()
        };
        assert!(kept((1 << 14) - 256..1 << 14) > 200, "{}", hashes.used());
        assert_eq!(kept(0..1 << 12), 0);
    }
}
