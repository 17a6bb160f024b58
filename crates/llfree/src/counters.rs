//! Areas and trees: what the guest's side and the host's side both change.

use crate::area::Area;
use crate::atomic::{Atom, AtomicU16, AtomicU32};
use crate::error::LayoutError;
use crate::layout::{Counts, TREE_AREAS};
use crate::tree::Tree;

#[derive(Clone, Copy)]
pub(crate) struct Counters<'a> {
    pub areas: &'a [AtomicU16],
    pub trees: &'a [AtomicU32],
}

impl<'a> Counters<'a> {
    /// Selects the words of a zone. The arrays may be longer.
    pub fn new(
        areas: &'a [AtomicU16],
        trees: &'a [AtomicU32],
        frames: u64,
    ) -> Result<Counters<'a>, LayoutError> {
        let counts = Counts::new(frames, 1);
        let areas = areas.get(..counts.areas).ok_or(LayoutError::Short)?;
        let trees = trees.get(..counts.trees).ok_or(LayoutError::Short)?;
        Ok(Counters { areas, trees })
    }

    /// Reads an area, or returns `None` if there is no such area.
    #[inline(always)]
    pub fn area(&self, index: usize) -> Option<Area> {
        self.areas.get(index).map(|area| Area(area.get()))
    }

    #[inline(always)]
    pub fn replace(&self, index: usize, old: Area, next: Area) -> Result<(), Area> {
        self.areas[index].replace(old.0, next.0).map_err(Area)
    }

    /// Changes an area and its tree's count. Returns the area's word from before, or `None` if
    /// `next` wants no change.
    #[inline(always)]
    pub fn update(&self, index: usize, mut next: impl FnMut(Area) -> Option<Area>) -> Option<Area> {
        let seen = self.area(index)?;
        self.update_from(index, seen, &mut next)
    }

    /// Does what [`Counters::update`] does, if the caller has read the area already (`seen`).
    /// Reading it ahead of the caller's preceding atomic operation is faster.
    #[inline(always)]
    pub fn update_from(
        &self,
        index: usize,
        mut seen: Area,
        mut next: impl FnMut(Area) -> Option<Area>,
    ) -> Option<Area> {
        loop {
            let tree = Tree(self.trees[index / TREE_AREAS].peek());
            let after = next(seen)?;
            match self.replace(index, seen, after) {
                Ok(()) => {
                    self.count(index, tree, seen, after);
                    return Some(seen);
                }
                Err(now) => seen = now,
            }
        }
    }

    /// Counts an area's change in its tree, whose word was `tree` a moment ago.
    #[inline(always)]
    fn count(&self, index: usize, tree: Tree, before: Area, after: Area) {
        let frames = after.steps() as i32 - before.steps() as i32;
        if frames != 0 {
            self.shift(index / TREE_AREAS, tree, frames, 0);
        }
    }

    #[inline(always)]
    pub fn shift(&self, tree: usize, mut seen: Tree, frames: i32, evicted: i32) {
        while let Err(now) = self.trees[tree].replace(seen.0, seen.shift(frames, evicted).0) {
            seen = Tree(now);
        }
    }

    pub fn tree(&self, index: usize) -> Tree {
        Tree(self.trees[index].peek())
    }
}
