//! Searching for a tree, and the reservations of slots.

use core::ops::Range;

use crate::atomic::{Atom, AtomicU64};
use crate::get::{Grab, Want};
use crate::layout::{AREA_ROWS, HUGE_ORDER, TREE_AREAS, TREE_FRAMES};
use crate::slot::Slot;
use crate::tree::Tree;
use crate::zone::{Touch, Zone};

/// Criteria for trees. The search tries several passes in order.
struct Pass {
    /// Trees to look at.
    reach: Reach,
    /// Least and most free frames of the tree.
    free: (u32, u32),
    /// Kinds of trees to accept.
    kinds: Kinds,
    /// Whether trees that another slot has reserved are accepted.
    reserved: bool,
    /// Whether areas without memory are accepted.
    evicted: bool,
}

#[derive(Clone, Copy)]
enum Reach {
    /// The core's share of the zone, where no other core's cache lines are.
    Share,
    /// The aligned group of this many trees (a power of two) around the last one, within the share.
    Group(usize),
    All,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    Own,
    OwnOrFree,
    Any,
}

/// The trees in one cache line of the array.
const NEAR: Reach = Reach::Group(16);
/// The trees to look at before the search breaks into a free one.
const FAR: Reach = Reach::Group(256);
const FULL: u32 = TREE_FRAMES as u32;

const fn pass(reach: Reach, free: (u32, u32), kinds: Kinds) -> Pass {
    Pass { reach, free, kinds, reserved: false, evicted: false }
}

/// Passes for orders below 9. Half-empty trees of the own kind come first: full trees are nearly
/// used up, and empty trees may become free as a whole.
const SMALL: [Pass; 5] = [
    pass(NEAR, (FULL / 16, FULL / 2), Kinds::Own),
    pass(NEAR, (FULL / 64, FULL / 16 * 15), Kinds::Own),
    pass(FAR, (1, FULL - 1), Kinds::Own),
    pass(Reach::Share, (1, FULL), Kinds::OwnOrFree),
    pass(Reach::All, (1, FULL), Kinds::OwnOrFree),
];
const HUGE: [Pass; 3] = [
    pass(NEAR, (1, FULL), Kinds::Own),
    pass(Reach::Share, (1, FULL), Kinds::OwnOrFree),
    pass(Reach::All, (1, FULL), Kinds::OwnOrFree),
];
/// Last passes: trees of another kind, then those of another slot, then those without memory.
const STEAL: [Pass; 3] = [
    pass(Reach::All, (1, FULL), Kinds::Any),
    Pass { reserved: true, ..pass(Reach::All, (1, FULL), Kinds::Any) },
    Pass { reserved: true, evicted: true, ..pass(Reach::All, (1, FULL), Kinds::Any) },
];

impl Pass {
    fn fits(&self, tree: Tree, want: Want) -> bool {
        let (least, most) = self.free;
        let least = least.max(1 << want.order);
        (least..=most).contains(&tree.free())
            && (self.reserved || !tree.is_reserved())
            && (self.evicted || tree.has_memory())
            && match self.kinds {
                Kinds::Own => tree.kind() == want.kind && !tree.is_free(),
                Kinds::OwnOrFree => tree.kind() == want.kind || tree.is_free(),
                Kinds::Any => true,
            }
    }

    /// Returns the trees to look at: those after `from` first, then around.
    fn trees(&self, from: usize, share: Range<usize>, count: usize) -> impl Iterator<Item = usize> {
        let (start, end) = match self.reach {
            Reach::Group(size) => {
                let group = from & !(size - 1);
                (group.max(share.start), share.end.min(group + size))
            }
            Reach::Share => (share.start, share.end),
            Reach::All => (0, count),
        };
        let end = end.min(count);
        let next = if (start..end).contains(&from) { from + 1 } else { start };
        (next..end).chain(start..next)
    }
}

impl<T: Touch> Zone<'_, T> {
    /// Allocates a block from the best tree after `from`.
    #[cold]
    pub(crate) fn search(&self, from: usize, want: Want) -> Option<Grab> {
        let first: &[Pass] = if want.order < HUGE_ORDER { &SMALL } else { &HUGE };
        let from = from.min(self.counters.trees.len() - 1);
        first.iter().chain(&STEAL).find_map(|pass| self.search_with(pass, from, want)).or_else(
            || {
                // Claims hide frames, and a tree's count may lag behind.
                self.end_claims(|_| true);
                let want = Want { evicted: true, ..want };
                let each = |tree| self.grab_in_tree(tree, tree * TREE_AREAS * AREA_ROWS, want);
                (0..self.counters.trees.len()).find_map(each)
            },
        )
    }

    fn search_with(&self, pass: &Pass, from: usize, want: Want) -> Option<Grab> {
        let want = Want { evicted: pass.evicted, ..want };
        let share = self.home(want.core)..self.home(want.core + 1);
        pass.trees(from, share, self.counters.trees.len())
            .filter(|&index| pass.fits(self.counters.tree(index), want))
            .find_map(|index| self.grab_reserved(index, want))
    }

    /// Reserves a tree and allocates a block from it. If that fails, the tree is released again.
    fn grab_reserved(&self, index: usize, want: Want) -> Option<Grab> {
        let tree = &self.counters.trees[index];
        let before = Tree(tree.change(|tree| Some(Tree(tree).reserve(want.kind).0))?);
        let grab = self.grab_in_tree(index, index * TREE_AREAS * AREA_ROWS, want);
        if grab.is_none() && !before.is_reserved() {
            self.release(index);
        }
        grab
    }

    fn release(&self, index: usize) {
        if let Some(tree) = self.counters.trees.get(index) {
            tree.change(|tree| Some(Tree(tree).release().0));
        }
    }

    /// Moves the slot to `next`, unless somebody else has moved it.
    pub(crate) fn place(&self, slot: &AtomicU64, seen: Slot, next: Slot) {
        let left = if slot.replace(seen.0, next.0).is_ok() { (seen, next) } else { (next, seen) };
        let (gone, kept) = left;
        self.give_back(gone.area(), gone.claims());
        if let Some(tree) = gone.tree()
            && kept.tree() != Some(tree)
        {
            self.release(tree);
        }
    }

    /// Takes back slots' claims on the areas that `of` selects.
    pub(crate) fn end_claims(&self, of: impl Fn(usize) -> bool) {
        for slot in self.slots {
            let before = slot[0].change(|seen| {
                let seen = Slot(seen);
                (seen.claims() > 0 && of(seen.area())).then(|| seen.without_claims().0)
            });
            if let Some(before) = before.map(Slot) {
                self.give_back(before.area(), before.claims());
            }
        }
    }

    /// Gives all reservations back: for a core that goes offline, or before the zone's words are
    /// compared.
    pub fn drain(&self) {
        for slot in self.slots {
            let before = slot[0].change(|seen| (seen != Slot::NONE.0).then_some(Slot::NONE.0));
            let Some(before) = before.map(Slot) else { continue };
            self.give_back(before.area(), before.claims());
            if let Some(tree) = before.tree() {
                self.release(tree);
            }
        }
    }
}
