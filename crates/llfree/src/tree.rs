//! The word of one tree: 8 areas, 16 MiB. All of it is a hint for the search.

use crate::layout::{
    AREA_FRAMES, TREE_AREAS, TREE_EVICTED_MASK, TREE_EVICTED_SHIFT, TREE_FRAMES, TREE_FREE_MASK,
    TREE_KIND_MASK, TREE_KIND_SHIFT, TREE_RESERVED,
};

/// A copy of a tree's word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tree(pub u32);

impl Tree {
    /// Returns the free frames, in steps. It is 0 while more has been subtracted than added.
    #[inline(always)]
    pub fn free(self) -> u32 {
        let free = self.0 & TREE_FREE_MASK;
        if free > TREE_FRAMES as u32 { 0 } else { free }
    }

    pub fn is_free(self) -> bool {
        self.free() == TREE_FRAMES as u32
    }

    /// Whether an area seems to be free in part. It is wrong if all such areas together count for as
    /// many frames as whole ones.
    pub fn has_part(self) -> bool {
        !self.free().is_multiple_of(AREA_FRAMES as u32)
    }

    pub fn is_reserved(self) -> bool {
        self.0 & TREE_RESERVED != 0
    }

    pub fn kind(self) -> u32 {
        (self.0 & TREE_KIND_MASK) >> TREE_KIND_SHIFT
    }

    /// Whether an area of the tree has memory.
    pub fn has_memory(self) -> bool {
        self.evicted() < TREE_AREAS as u32
    }

    /// Returns the number of areas without memory.
    pub fn evicted(self) -> u32 {
        (self.0 & TREE_EVICTED_MASK) >> TREE_EVICTED_SHIFT
    }

    /// Adds to both counts, modulo the fields' sizes: changes by two threads may arrive in the
    /// wrong order, but their sum is right.
    #[inline(always)]
    pub fn shift(self, frames: i32, evicted: i32) -> Tree {
        let free = self.0.wrapping_add_signed(frames) & TREE_FREE_MASK;
        let evicted = self.0.wrapping_add_signed(evicted << TREE_EVICTED_SHIFT) & TREE_EVICTED_MASK;
        Tree(self.0 & !(TREE_FREE_MASK | TREE_EVICTED_MASK) | free | evicted)
    }

    /// Reserves the tree for a slot of this kind. Only a free tree changes its kind.
    pub fn reserve(self, kind: u32) -> Tree {
        let kind = if self.is_free() { kind } else { self.kind() };
        Tree(self.0 & !TREE_KIND_MASK | TREE_RESERVED | kind << TREE_KIND_SHIFT)
    }

    pub fn release(self) -> Tree {
        Tree(self.0 & !TREE_RESERVED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_never_reach_the_bits_above() {
        let tree = Tree(0).reserve(2);
        assert_eq!(tree.shift(-16, -1).shift(16, 1), tree);
        assert_eq!(tree.shift(-16, 0).free(), 0);
        assert!(tree.shift(-16, 0).is_reserved());
        assert_eq!(tree.shift(4096, 8).release().reserve(1).kind(), 1);
        assert!(!tree.shift(0, 8).has_memory());
    }

    #[test]
    fn whole_areas_are_no_part() {
        assert!(!Tree(0).has_part() && !Tree(3 * 512).has_part() && !Tree(4096).has_part());
        assert!(Tree(16).has_part() && Tree(3 * 512 + 496).has_part());
    }
}
