//! Results of saving and loading several pages at once.

use crate::{CLUSTER_SLOTS, Page, StoreError};

const WORDS: usize = (CLUSTER_SLOTS / u64::BITS as u64) as usize;

/// Where the pages of a batch were saved.
#[derive(Debug, Default)]
pub struct SavedBatch {
    /// The slot of each page. `None`: it is not stored.
    pub slots: Vec<Option<u64>>,
    /// Why some pages are not stored.
    pub error: Option<StoreError>,
}

impl SavedBatch {
    /// Returns runs of pages in adjacent slots: the first page's index, its slot, the number of
    /// pages.
    pub fn runs(&self) -> impl Iterator<Item = (usize, u64, usize)> {
        let slots: &[Option<u64>] = &self.slots;
        let adjacent =
            |a: &Option<u64>, b: &Option<u64>| a.is_some() && a.map(|slot| slot + 1) == *b;
        slots
            .chunk_by(adjacent)
            .scan(0, |at, run| {
                let index = *at;
                *at += run.len();
                Some((index, run))
            })
            .filter_map(|(index, run)| Some((index, (*run.first()?)?, run.len())))
    }
}

/// Which pages of a batch were loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Loaded([u64; WORDS]);

impl Loaded {
    /// Whether page `index` of the batch has its slot's content.
    pub fn has(&self, index: usize) -> bool {
        let word = self.0.get(index / 64).copied().unwrap_or(0);
        word >> (index % 64) & 1 == 1
    }

    /// Returns how many pages were loaded.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Calls `ready` with those pages of `which` that were loaded, in this order.
    pub(crate) fn tell(self, pages: &[Page], which: &[usize], ready: &mut dyn FnMut(usize, &Page)) {
        for &index in which.iter().filter(|index| self.has(**index)) {
            if let Some(page) = pages.get(index) {
                ready(index, page);
            }
        }
    }

    pub(crate) fn set(&mut self, index: usize) {
        if let Some(word) = self.0.get_mut(index / 64) {
            *word |= 1 << (index % 64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_adjacent_slots() {
        let slots = vec![Some(5), Some(6), None, None, Some(7), Some(9), Some(10), Some(11)];
        let batch = SavedBatch { slots, error: None };
        assert_eq!(batch.runs().collect::<Vec<_>>(), [(0, 5, 2), (4, 7, 1), (5, 9, 3)]);
    }

    #[test]
    fn loaded_pages_are_known_by_index() {
        let mut loaded = Loaded::default();
        [0, 63, 64, 255, 256].into_iter().for_each(|index| loaded.set(index));
        let found: Vec<usize> = (0..300).filter(|&index| loaded.has(index)).collect();
        assert_eq!(found, [0, 63, 64, 255]);
        assert_eq!(loaded.count(), 4);
    }
}
