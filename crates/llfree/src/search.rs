//! Finding a tree to take from, and the slots' reservations.

use core::ops::Range;

use crate::atomic::{Atom, AtomicU64};
use crate::get::{Grab, Want};
use crate::layout::{AREA_ROWS, HUGE_ORDER, TREE_AREAS, TREE_FRAMES};
use crate::slot::Slot;
use crate::tree::Tree;
use crate::zone::{Touch, Zone};

/// One way to look at trees; they are tried in turn.
struct Pass {
    /// Which trees.
    reach: Reach,
    /// Least and most that a tree may have free.
    free: (u32, u32),
    /// Of which kinds.
    kinds: Kinds,
    /// Even if another slot takes from it.
    reserved: bool,
    /// Even areas without memory.
    evicted: bool,
}

#[derive(Clone, Copy)]
enum Reach {
    /// The core's part of the zone: there it meets no other core's lines.
    Share,
    /// Of that, the aligned group of so many, a power of two, that the last one is in.
    Group(usize),
    All,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    Own,
    OwnOrFree,
    Any,
}

/// Trees of a cache line of the array.
const NEAR: Reach = Reach::Group(16);
/// Trees looked at before a free one is broken into.
const FAR: Reach = Reach::Group(256);
const FULL: u32 = TREE_FRAMES as u32;

const fn pass(reach: Reach, free: (u32, u32), kinds: Kinds) -> Pass {
    Pass { reach, free, kinds, reserved: false, evicted: false }
}

/// Half-empty trees of the own kind first: full ones are nearly used up, empty
/// ones may become free as a whole.
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
/// Another kind's, then another slot's, then those whose memory the host has.
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

    /// The trees to look at: those after `from` first, then around.
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
    /// A block from the best tree after `from`.
    #[cold]
    pub(crate) fn search(&self, from: usize, want: Want) -> Option<Grab> {
        let first: &[Pass] = if want.order < HUGE_ORDER { &SMALL } else { &HUGE };
        let from = from.min(self.counters.trees.len() - 1);
        first.iter().chain(&STEAL).find_map(|pass| self.search_with(pass, from, want)).or_else(
            || {
                // Claims hide frames, and a tree's count may be on its way.
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

    /// Reserves a tree if there is such a block in it.
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

    /// The slot goes on at `next`, unless somebody else has moved it.
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

    /// Takes back slots' claims on the areas that `of` names.
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

    /// Gives all reservations back: for a core that goes, or before the zone's
    /// words are compared.
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
