//! 256 slots, a bit each, that any thread sets and clears.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// Number of slots.
pub(crate) const COUNT: u64 = 256;

const BITS: u64 = u64::BITS as u64;
const WORDS: usize = (COUNT / BITS) as usize;

/// The bits at one time.
pub(crate) type Words = [u64; WORDS];

#[derive(Default)]
pub(crate) struct SlotBits([AtomicU64; WORDS]);

impl SlotBits {
    /// Sets a bit. `false`: it was set, or does not exist.
    pub(crate) fn set(&self, at: u64) -> bool {
        self.word(at).is_some_and(|(word, bit)| word.fetch_or(bit, SeqCst) & bit == 0)
    }

    /// Clears a bit. `false`: it was not set.
    pub(crate) fn clear(&self, at: u64) -> bool {
        self.word(at).is_some_and(|(word, bit)| word.fetch_and(!bit, SeqCst) & bit != 0)
    }

    pub(crate) fn has(&self, at: u64) -> bool {
        self.word(at).is_some_and(|(word, bit)| word.load(SeqCst) & bit != 0)
    }

    pub(crate) fn count(&self) -> u32 {
        self.words().iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the first run of clear bits between `from` and `end`: its first bit, and its length
    /// up to `most`.
    pub(crate) fn free_run(&self, from: u64, end: u64, most: u64) -> Option<(u64, u64)> {
        let words = self.words();
        let first = next_zero(&words, from).filter(|&first| first < end)?;
        let last = next_zero(&words.map(|word| !word), first).unwrap_or(COUNT).min(end);
        Some((first, (last - first).min(most)))
    }

    /// Sets the bits from `first` to before `end`.
    pub(crate) fn fill(&self, first: u64, end: u64) {
        for (word, start) in self.0.iter().zip((0..).step_by(BITS as usize)) {
            let (low, high) = (first.clamp(start, start + BITS), end.clamp(start, start + BITS));
            if low < high {
                word.fetch_or(u64::MAX >> (BITS - (high - low)) << (low - start), SeqCst);
            }
        }
    }

    pub(crate) fn set_all(&self, bits: Words) {
        for (word, bits) in self.0.iter().zip(bits) {
            word.fetch_or(bits, SeqCst);
        }
    }

    pub(crate) fn clear_all(&self, bits: Words) {
        for (word, bits) in self.0.iter().zip(bits) {
            word.fetch_and(!bits, SeqCst);
        }
    }

    /// Clears all bits. Returns those that were set here and are not in `other`.
    pub(crate) fn take_all(&self, other: &SlotBits) -> Words {
        let mut taken = [0; WORDS];
        for ((taken, this), other) in taken.iter_mut().zip(&self.0).zip(&other.0) {
            *taken = this.swap(0, SeqCst) & !other.load(SeqCst);
        }
        taken
    }

    /// Returns the bits that are set here and not in `other`.
    pub(crate) fn without(&self, other: &SlotBits) -> Words {
        let mut words = self.words();
        words.iter_mut().zip(other.words()).for_each(|(word, other)| *word &= !other);
        words
    }

    pub(crate) fn words(&self) -> Words {
        self.0.each_ref().map(|word| word.load(SeqCst))
    }

    fn word(&self, at: u64) -> Option<(&AtomicU64, u64)> {
        Some((self.0.get((at / BITS) as usize)?, 1 << (at % BITS)))
    }
}

/// Returns the runs (first, count) of ones.
pub(crate) fn runs(words: Words) -> impl Iterator<Item = (u64, u64)> {
    let zeros = words.map(|word| !word);
    let mut at = 0;
    std::iter::from_fn(move || {
        let first = next_zero(&zeros, at)?;
        at = next_zero(&words, first).unwrap_or(COUNT);
        Some((first, at - first))
    })
}

/// Returns the first zero at or after `from`.
fn next_zero(words: &Words, from: u64) -> Option<u64> {
    let mut at = from;
    while let Some(word) = words.get((at / BITS) as usize) {
        // The shift brings in zeros from the top: the run ends at the end of the word.
        let ones = u64::from((word >> (at % BITS)).trailing_ones());
        if ones < BITS - at % BITS {
            return Some(at + ones);
        }
        at = (at / BITS + 1) * BITS;
    }
    None
}
