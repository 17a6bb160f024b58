//! A set of small numbers, a bit each, that any thread adds and removes.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

const BITS: usize = u64::BITS as usize;

pub(crate) struct NumberSet {
    words: Vec<AtomicU64>,
}

impl NumberSet {
    /// Makes an empty set for numbers below `end`. Others are never in it.
    pub(crate) fn new(end: usize) -> NumberSet {
        NumberSet { words: (0..end.div_ceil(BITS)).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn insert(&self, number: usize) {
        let bit = 1 << (number % BITS);
        if let Some(word) = self.words.get(number / BITS)
            && word.load(SeqCst) & bit == 0
        {
            word.fetch_or(bit, SeqCst);
        }
    }

    pub(crate) fn remove(&self, number: usize) {
        if let Some(word) = self.words.get(number / BITS) {
            word.fetch_and(!(1 << (number % BITS)), SeqCst);
        }
    }

    pub(crate) fn has(&self, number: usize) -> bool {
        let word = self.words.get(number / BITS).map_or(0, |word| word.load(SeqCst));
        word >> (number % BITS) & 1 == 1
    }

    /// Returns the least number. It reads a word for 64 numbers: for 16384 slots, if they are
    /// clusters.
    pub(crate) fn first(&self) -> Option<usize> {
        let bits = self.words.iter().map(|word| word.load(Relaxed).trailing_zeros() as usize);
        let (word, bit) = bits.enumerate().find(|(_, bit)| *bit < BITS)?;
        Some(word * BITS + bit)
    }
}
