//! The words of a zone in which all threads share the slots.

use std::vec::Vec;

use crate::atomic::{Atom, AtomicU16, AtomicU32, AtomicU64};
use crate::layout::{Counts, SLOT_WORDS};
use crate::slot::Slot;
use crate::tree::Tree;
use crate::{Host, Parts, Touch, Zone};

pub(super) struct Words {
    bits: Vec<AtomicU64>,
    areas: Vec<AtomicU16>,
    trees: Vec<AtomicU32>,
    slots: Vec<AtomicU64>,
    frames: u64,
}

impl Words {
    pub(super) fn new(frames: u64) -> Words {
        let counts = Counts::new(frames, 1);
        Words {
            bits: (0..counts.rows).map(|_| AtomicU64::new(0)).collect(),
            areas: (0..counts.areas).map(|_| AtomicU16::new(0)).collect(),
            trees: (0..counts.trees).map(|_| AtomicU32::new(0)).collect(),
            slots: (0..counts.slot_words).map(|_| AtomicU64::new(0)).collect(),
            frames,
        }
    }

    pub(super) fn zone<T: Touch>(&self, touch: T) -> Zone<'_, T> {
        let Words { bits, areas, trees, slots, frames } = self;
        Zone::new(Parts { bits, areas, trees, slots }, *frames, 1, touch).unwrap()
    }

    pub(super) fn host(&self) -> Host<'_> {
        Host::new(&self.areas, &self.trees, self.frames).unwrap()
    }

    /// Checks that each reserved tree is a slot's: nobody has forgotten to release one.
    pub(super) fn check_reserved(&self) {
        let slots = self.slots.iter().step_by(SLOT_WORDS);
        let slots: Vec<_> = slots.map(|slot| Slot(slot.get()).tree()).collect();
        for (index, tree) in self.trees.iter().enumerate() {
            let is_reserved = Tree(tree.get()).is_reserved();
            assert!(!is_reserved || slots.contains(&Some(index)), "tree {index} is no slot's");
        }
    }
}
