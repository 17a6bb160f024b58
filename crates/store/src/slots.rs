//! Which slots are in use: a bit each, taken and released by anyone at once.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

const BITS: u64 = u64::BITS as u64;

/// A fixed number of slots.
pub(crate) struct Slots {
    /// 1: in use. Bits beyond the last slot are in use for ever.
    words: Vec<AtomicU64>,
    /// 1: released since it was last asked for.
    stale: Vec<AtomicU64>,
    count: u64,
    /// The word in which a slot was found last: neighbours in time become
    /// neighbours on disk.
    hint: AtomicU64,
}

impl Slots {
    pub(crate) fn new(count: u64) -> Slots {
        let words: Vec<AtomicU64> = (0..count.div_ceil(BITS))
            .map(|word| {
                let inside = (count - word * BITS).min(BITS);
                AtomicU64::new(if inside == BITS { 0 } else { u64::MAX << inside })
            })
            .collect();
        let stale = words.iter().map(|_| AtomicU64::new(0)).collect();
        Slots { words, stale, count, hint: AtomicU64::new(0) }
    }

    /// A free slot, in use from now on.
    pub(crate) fn take(&self) -> Option<u64> {
        let total = self.words.len() as u64;
        let start = self.hint.load(Relaxed);
        (start..start + total).map(|at| at % total).find_map(|at| {
            let slot = take_bit(self.words.get(at as usize)?)?;
            self.hint.store(at, Relaxed);
            Some(at * BITS + slot)
        })
    }

    /// Takes this slot; `false`: it is in use, or there is none such.
    pub(crate) fn take_this(&self, slot: u64) -> bool {
        let (bit, word) = (1 << (slot % BITS), self.word(slot));
        word.is_some_and(|word| word.fetch_or(bit, AcqRel) & bit == 0)
    }

    pub(crate) fn release(&self, slot: u64) {
        if let (Some(word), Some(stale)) = (self.word(slot), self.stale.get((slot / BITS) as usize))
        {
            let bit = 1 << (slot % BITS);
            stale.fetch_or(bit, AcqRel);
            word.fetch_and(!bit, AcqRel);
        }
    }

    /// Runs of slots (first, count) that were released since they were last
    /// asked for and are still free. Nobody may take slots meanwhile.
    pub(crate) fn stale(&self) -> impl Iterator<Item = (u64, u64)> {
        self.stale.iter().zip(&self.words).zip(0..).flat_map(|((stale, word), index): (_, u64)| {
            let mut bits = stale.swap(0, AcqRel) & !word.load(Relaxed);
            std::iter::from_fn(move || {
                let first = u64::from((bits != 0).then(|| bits.trailing_zeros())?);
                let count = u64::from((bits >> first).trailing_ones());
                bits &= (u64::MAX << first).checked_shl(count as u32).unwrap_or(0);
                Some((index * BITS + first, count))
            })
        })
    }

    pub(crate) fn is_taken(&self, slot: u64) -> bool {
        self.word(slot).is_some_and(|word| word.load(Relaxed) >> (slot % BITS) & 1 == 1)
    }

    fn word(&self, slot: u64) -> Option<&AtomicU64> {
        (slot < self.count).then(|| self.words.get((slot / BITS) as usize))?
    }
}

fn take_bit(word: &AtomicU64) -> Option<u64> {
    let mut seen = word.load(Relaxed);
    while seen != u64::MAX {
        let bit = seen.trailing_ones();
        match word.compare_exchange(seen, seen | 1 << bit, AcqRel, Relaxed) {
            Ok(_) => return Some(u64::from(bit)),
            Err(now) => seen = now,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn hands_out_each_slot_once(count in 1..300u64, steps in prop::collection::vec(0..3u8, 1..600)) {
            let slots = Slots::new(count);
            let mut used = BTreeSet::new();
            for step in steps {
                match (step, used.first().copied()) {
                    (0, Some(slot)) => {
                        slots.release(slot);
                        used.remove(&slot);
                    }
                    _ => match slots.take() {
                        Some(slot) => prop_assert!(slot < count && used.insert(slot)),
                        None => prop_assert_eq!(used.len() as u64, count),
                    },
                }
                prop_assert!((0..count).all(|slot| slots.is_taken(slot) == used.contains(&slot)));
            }
        }
    }

    #[test]
    fn released_slots_are_told_once_in_runs() {
        let slots = Slots::new(200);
        (0..200).for_each(|slot| assert!(slots.take_this(slot)));
        [3, 4, 5, 63, 64, 199].into_iter().for_each(|slot| slots.release(slot));
        assert!(slots.take_this(4));
        let runs: Vec<(u64, u64)> = slots.stale().collect();
        assert_eq!(runs, [(3, 1), (5, 1), (63, 1), (64, 1), (199, 1)]);
        assert_eq!(slots.stale().count(), 0);
        (0..64).for_each(|slot| slots.release(slot));
        assert_eq!(slots.stale().collect::<Vec<_>>(), [(0, 64)]);
    }

    #[test]
    fn a_slot_that_is_not_there_cannot_be_taken() {
        let slots = Slots::new(65);
        assert!(slots.take_this(64));
        assert!(!slots.take_this(64));
        assert!(!slots.take_this(65));
    }
}
