//! Searching for a tree, and the reservations of slots.

use crate::atomic::{Atom, AtomicU64};
use crate::fullest::fullest_first;
use crate::get::{Grab, Want};
use crate::layout::{AREA_FRAMES, CLAIM_FRAMES, HUGE_ORDER};
use crate::slot::Slot;
use crate::tree::Tree;
use crate::zone::{Touch, Zone};

/// Criteria for trees. The search tries several passes in order.
struct Pass {
    /// Trees to look at.
    reach: Reach,
    /// Kinds of trees to accept.
    kinds: Kinds,
    /// Whether only areas that are free in part are accepted. The fullest trees come first then.
    parts: bool,
    /// Whether trees that another slot has reserved are accepted.
    reserved: bool,
}

#[derive(Clone, Copy)]
enum Reach {
    /// The aligned group of so many trees around the slot's tree, within the share.
    Near(usize),
    /// The core's share of the zone, where no other core's cache lines are. It is the whole zone if
    /// all cores share the slots.
    Share,
    All,
}

enum Kinds {
    /// Trees of the own kind in which enough is free for the slot to move there.
    Own,
    OwnOrFree,
    Any,
}

/// Trees to look at before an area is broken into that is free as a whole: 16 cache lines.
const NEAR_TREES: usize = 256;
/// Trees to look at before a huge frame takes from a tree that is free as a whole: 2 cache lines. A
/// tree has huge frames for no more than eight gets.
const NEAR_TREES_HUGE: usize = 32;
/// Free blocks that are enough for the slot to move to a tree. So are the frames of one area.
const ENOUGH_BLOCKS: u32 = CLAIM_FRAMES as u32;

const fn pass(reach: Reach, kinds: Kinds) -> Pass {
    Pass { reach, kinds, parts: false, reserved: false }
}

/// First passes: what is partly used comes before what is free as a whole, areas as well as trees.
static OWN: [Pass; 4] = [
    Pass { parts: true, ..pass(Reach::Near(NEAR_TREES), Kinds::Own) },
    pass(Reach::Share, Kinds::Own),
    pass(Reach::Share, Kinds::OwnOrFree),
    pass(Reach::All, Kinds::OwnOrFree),
];
/// First passes for huge frames, which have no use for an area that is free in part.
static OWN_HUGE: [Pass; 3] = [
    pass(Reach::Near(NEAR_TREES_HUGE), Kinds::Own),
    pass(Reach::Share, Kinds::OwnOrFree),
    pass(Reach::All, Kinds::OwnOrFree),
];
/// Last passes: trees of another kind, then those of another slot.
static STEAL: [Pass; 2] =
    [pass(Reach::All, Kinds::Any), Pass { reserved: true, ..pass(Reach::All, Kinds::Any) }];

impl Pass {
    /// Returns the least number of free frames that a tree must have.
    fn least(&self, order: u8) -> u32 {
        let enough = match self.kinds {
            Kinds::Own => (ENOUGH_BLOCKS << order).min(AREA_FRAMES as u32),
            _ => 1,
        };
        enough.max(1 << order)
    }
}

impl<T: Touch> Zone<'_, T> {
    /// Allocates a block from the best tree.
    #[cold]
    pub(crate) fn search(&self, want: Want) -> Option<Grab> {
        let want = Want { tree: want.tree.min(self.counters.trees.len() - 1), ..want };
        let own = if want.order < HUGE_ORDER { &OWN[..] } else { &OWN_HUGE[..] };
        // Areas without memory come before trees of another kind: mixed trees rarely become free.
        let turns = [(own, false), (own, true), (&STEAL[..], false), (&STEAL[1..], true)];
        let each = |(passes, evicted): (&[Pass], bool)| {
            passes.iter().find_map(|pass| self.search_with(pass, Want { evicted, ..want }))
        };
        turns.into_iter().find_map(each).or_else(|| {
            // Claims hide frames, and a tree's count may lag behind.
            self.end_claims(|_| true);
            let want = Want { whole: true, evicted: true, ..want };
            (0..self.counters.trees.len()).find_map(|tree| self.grab_in_tree(tree, want))
        })
    }

    fn search_with(&self, pass: &Pass, want: Want) -> Option<Grab> {
        let want = Want { whole: !pass.parts, ..want };
        let candidate = |index: usize| Some((self.fits(pass, index, want)?, index));
        let mut trees = self.trees(pass.reach, want).filter_map(candidate);
        match pass.parts {
            true => fullest_first(trees).find_map(|index| self.grab_reserved(index, want)),
            false => trees.find_map(|(_, index)| self.grab_reserved(index, want)),
        }
    }

    /// Returns the trees to look at: the slot's first, then those after it, and around.
    fn trees(&self, reach: Reach, want: Want) -> impl Iterator<Item = usize> {
        let share = self.home(want.core)..self.home(want.core + 1);
        let (start, end) = match reach {
            Reach::Near(count) => {
                let group = want.tree & !(count - 1);
                (group.max(share.start), share.end.min(group + count))
            }
            Reach::Share => (share.start, share.end),
            Reach::All => (0, self.counters.trees.len()),
        };
        let first = if (start..end).contains(&want.tree) { want.tree } else { start };
        (first..end).chain(start..first)
    }

    /// Returns how many frames of a tree are free, if a pass accepts the tree.
    fn fits(&self, pass: &Pass, index: usize, want: Want) -> Option<u32> {
        let tree = self.counters.tree(index);
        if tree.free() < pass.least(want.order) {
            return None;
        }
        let is_own = tree.kind() == want.kind;
        let is_kind = match pass.kinds {
            Kinds::Own => is_own && !tree.is_free(),
            Kinds::OwnOrFree => is_own || tree.is_free(),
            Kinds::Any => true,
        };
        // The parts of the slot's own tree were tried before.
        let has_area = !pass.parts || index != want.tree && tree.has_part();
        // If all cores share the slots, there is one for each kind.
        let is_ours = is_own && (self.cores == 1 || index == want.tree);
        let is_there = pass.reserved || is_ours || !tree.is_reserved();
        let has_memory = want.evicted || tree.has_memory();
        (is_kind && has_area && is_there && has_memory).then_some(tree.free())
    }

    /// Reserves a tree and allocates a block from it. If that fails, the tree is released again.
    fn grab_reserved(&self, index: usize, want: Want) -> Option<Grab> {
        let tree = &self.counters.trees[index];
        let before = Tree(tree.change(|tree| Some(Tree(tree).reserve(want.kind).0))?);
        let grab = self.grab_in_tree(index, want);
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
        match slot.replace(seen.0, next.0) {
            Ok(()) => self.leave(seen, next),
            Err(now) => self.leave(next, Slot(now)),
        }
    }

    /// Gives up a reservation that a slot does not have, or has no longer, because it has `kept`.
    pub(crate) fn leave(&self, gone: Slot, kept: Slot) {
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
            if let Some(before) = before {
                self.leave(Slot(before), Slot::NONE);
            }
        }
    }
}
