//! Checks that a zone's words agree, while nobody changes them.

use crate::area::Area;
use crate::atomic::Atom;
use crate::layout::{AREA_ROWS, TREE_AREAS};
use crate::rows;
use crate::slot::Slot;
use crate::zone::{Touch, Zone};

/// Two words that contradict each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Disagreement {
    /// An area's count and claims disagree with its bits.
    #[error("area {area}: {counted} frames are free by count and claims, {bits} by bits")]
    Area {
        /// Index of the area.
        area: usize,
        /// Frames that are free by the area's count and the slots' claims.
        counted: u32,
        /// Frames that are free by the bits.
        bits: u32,
    },
    /// A tree's count disagrees with those of its areas.
    #[error("tree {tree}: counts {counted} free, its areas {areas}")]
    Tree {
        /// Index of the tree.
        tree: usize,
        /// Free frames by the tree's word.
        counted: u32,
        /// Free frames by its areas.
        areas: u32,
    },
    /// A tree's number of evicted areas is wrong.
    #[error("tree {tree} does not count its evicted areas")]
    Evicted {
        /// Index of the tree.
        tree: usize,
    },
}

impl<T: Touch> Zone<'_, T> {
    /// Compares trees with areas, and areas with bits and claims. Returns the number of free
    /// frames.
    ///
    /// # Errors
    /// The first disagreement.
    pub fn verify(&self) -> Result<u64, Disagreement> {
        (0..self.bits.len()).try_for_each(|index| self.verify_area(index))?;
        (0..self.counters.trees.len()).try_for_each(|index| self.verify_tree(index))?;
        Ok(self.free_frames())
    }

    fn verify_area(&self, index: usize) -> Result<(), Disagreement> {
        let area = Area(self.counters.areas[index].get());
        let rows = &self.bits[index];
        let bits = rows::count_free(rows, area.flip());
        let claims = self.slots.iter().map(|slot| Slot(slot[0].get()));
        let claims = claims.filter(|slot| slot.claims() > 0 && slot.area() == index);
        let claims: u32 = claims.map(|slot| u32::from(slot.claims())).sum();
        let counted = u32::from(area.free()) + claims;
        // The bits of a hard-reclaimed area mean "free", though no frame can be got.
        let hosts = area.is_allocated() && area.is_evicted() && bits as usize == AREA_ROWS * 64;
        let agree = if hosts { counted == 0 } else { counted == bits };
        if agree { Ok(()) } else { Err(Disagreement::Area { area: index, counted, bits }) }
    }

    fn verify_tree(&self, index: usize) -> Result<(), Disagreement> {
        let areas = || self.counters.areas.iter().skip(index * TREE_AREAS).take(TREE_AREAS);
        let steps: u32 = areas().map(|area| Area(area.get()).steps()).sum();
        let evicted = areas().filter(|area| Area(area.get()).is_evicted()).count();
        let tree = self.counters.tree(index);
        if tree.free() != steps {
            return Err(Disagreement::Tree { tree: index, counted: tree.free(), areas: steps });
        }
        if tree.evicted() as usize != evicted {
            return Err(Disagreement::Evicted { tree: index });
        }
        Ok(())
    }
}
