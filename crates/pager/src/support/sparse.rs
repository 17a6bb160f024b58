//! A number for each frame or slot, of which few are ever set.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

const PART: usize = 1024;

/// Numbers that start as zero, in parts that get memory when they are first needed.
pub(crate) struct Sparse {
    parts: Vec<OnceLock<Box<[AtomicU32; PART]>>>,
}

impl Sparse {
    pub(crate) fn new(count: u64) -> Sparse {
        Sparse { parts: (0..count.div_ceil(PART as u64)).map(|_| OnceLock::new()).collect() }
    }

    /// Sets all numbers to zero.
    pub(crate) fn clear(&self) {
        let parts = self.parts.iter().filter_map(OnceLock::get);
        parts.flat_map(|part| part.iter()).for_each(|number| number.store(0, Release));
    }

    /// Returns the number; `None` only if it is zero, or beyond the end.
    pub(crate) fn get(&self, index: u64) -> Option<&AtomicU32> {
        let part = self.parts.get(usize::try_from(index).ok()? / PART)?.get()?;
        part.get(index as usize % PART)
    }

    /// Whether one of `count` numbers from `first` on is not zero. A part that was never set costs
    /// one look, not one for each number.
    pub(crate) fn has_any(&self, first: u64, count: u64) -> bool {
        let end = first.saturating_add(count);
        let parts = first / PART as u64..end.div_ceil(PART as u64);
        { parts }.any(|index| {
            let found = usize::try_from(index).ok().and_then(|at| self.parts.get(at)?.get());
            let Some(part) = found else { return false };
            let begin = index * PART as u64;
            let from = first.saturating_sub(begin) as usize;
            let to = (end - begin).min(PART as u64) as usize;
            part.get(from..to)
                .is_some_and(|part| part.iter().any(|number| number.load(Acquire) != 0))
        })
    }

    /// Returns the number, to be set; `None`: it is beyond the end.
    pub(crate) fn make(&self, index: u64) -> Option<&AtomicU32> {
        let part = self.parts.get(usize::try_from(index).ok()? / PART)?;
        let part = part.get_or_init(|| Box::new([const { AtomicU32::new(0) }; PART]));
        part.get(index as usize % PART)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_sees_what_is_set_and_nothing_beside_it() {
        let numbers = Sparse::new(5000);
        assert!(!numbers.has_any(0, 10_000));
        for set in [0, 1023, 1024, 4999] {
            numbers.make(set).unwrap().store(1, Release);
            assert!(numbers.has_any(set, 1) && numbers.has_any(0, 5000));
            assert!(numbers.has_any(set.saturating_sub(700), 701 + 700));
            assert!(!numbers.has_any(set + 1, 512) && !numbers.has_any(set, 0));
            assert!(!numbers.has_any(set.saturating_sub(512), set.min(512)));
            numbers.clear();
        }
        assert!(!numbers.has_any(u64::MAX - 1, 9));
    }
}
