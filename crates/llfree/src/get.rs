//! Getting blocks.

use crate::area::Area;
use crate::atomic::{Atom, AtomicU64};
use crate::error::Error;
use crate::fullest::fullest_first;
use crate::layout::{
    AREA_FRAMES, AREA_ROWS, CLAIM_FRAMES, HUGE_ORDER, KIND_HUGE, MAX_ORDER, TREE_AREAS,
};
use crate::rows;
use crate::slot::Slot;
use crate::zone::{Kind, Touch, Zone};

/// A request for a block.
#[derive(Clone, Copy)]
pub(crate) struct Want {
    pub order: u8,
    pub kind: u32,
    /// The core whose share of the zone to search first, less than the zone's number of cores.
    pub core: u32,
    /// The slot's tree, where the search begins. Without a reservation, it is the first of the
    /// core's share.
    pub tree: usize,
    /// Whether areas that are free as a whole may be broken up, for orders below 9.
    pub whole: bool,
    /// Whether areas without memory may serve.
    pub evicted: bool,
}

impl Want {
    /// Whether a part of an area may serve.
    #[inline(always)]
    fn may_take(self, area: Area) -> bool {
        (self.whole || !area.is_free()) && (self.evicted || !area.is_evicted())
    }
}

/// A block that was allocated.
pub(crate) struct Grab {
    pub frame: u64,
    /// Its area's word from before.
    pub area: Area,
    /// Number of further frames of that area, claimed for the slot.
    pub claims: u16,
}

impl Grab {
    fn row(&self) -> usize {
        (self.frame / 64) as usize
    }
}

impl<T: Touch> Zone<'_, T> {
    /// Allocates a free block of `2^order` frames, and returns its first frame. The block has
    /// memory. `core` selects the slots to use; any number is valid. Several threads may use the
    /// same slots at once.
    ///
    /// # Errors
    /// [`Error::Order`], or [`Error::Memory`] if no such block is free.
    #[inline]
    pub fn get(&self, order: u8, kind: Kind, core: u32) -> Result<u64, Error> {
        let kind = if order < HUGE_ORDER { kind as u32 } else { KIND_HUGE };
        let core = self.slots_of(core);
        let slot = self.slot(core, kind);
        if order == 0
            && let Some(frame) = self.get_claimed(slot)
        {
            return Ok(frame);
        }
        if order > MAX_ORDER {
            return Err(Error::Order);
        }
        self.get_block(slot, order, kind, core)
    }

    /// Allocates the block that begins at `frame`, if it is free.
    ///
    /// # Errors
    /// There is no such block, or [`Error::Taken`].
    pub fn get_at(&self, frame: u64, order: u8) -> Result<(), Error> {
        self.check(frame, order)?;
        let index = (frame / AREA_FRAMES) as usize;
        let taken = self.take_at(index, frame, order).or_else(|| {
            // Slots may have claims on just these frames.
            let last = if order == MAX_ORDER { index + 1 } else { index };
            self.end_claims(|area| (index..=last).contains(&area));
            self.take_at(index, frame, order)
        });
        self.install(frame, order, taken.ok_or(Error::Taken)?);
        Ok(())
    }

    /// Allocates a frame from the slot's claims. It writes only the slot and the row.
    #[inline]
    fn get_claimed(&self, slot: &AtomicU64) -> Option<u64> {
        let mut seen = Slot(slot.get());
        while seen.claims() > 0 {
            let (index, flip) = (seen.area(), seen.flip());
            let rows = self.bits.get(index)?;
            let row = first_with_room(rows, seen.row() % AREA_ROWS, flip);
            let bits = rows[row].get();
            if let Err(now) = slot.replace(seen.0, seen.take().at_row(index * AREA_ROWS + row).0) {
                seen = Slot(now);
                continue;
            }
            let bit = rows::take_in_row(&rows[row], bits, flip).map(|bit| row * 64 + bit);
            let Some(first) = bit.or_else(|| rows::take(rows, row, 0, flip)) else {
                self.give_back(index, 1);
                return None;
            };
            return Some(index as u64 * AREA_FRAMES + first as u64);
        }
        None
    }

    fn get_block(&self, slot: &AtomicU64, order: u8, kind: u32, core: u32) -> Result<u64, Error> {
        let seen = Slot(slot.get());
        let tree = seen.tree().unwrap_or_else(|| self.home(core));
        let want = Want { order, kind, core, tree, whole: false, evicted: false };
        let near = seen.tree().and_then(|tree| self.grab_at(tree, seen, want));
        let grab = near.or_else(|| self.search(want)).ok_or(Error::Memory)?;
        // Install before others may use the claims, because they do not touch.
        self.install(grab.frame, order, grab.area);
        let next = Slot::new(grab.row(), grab.claims, grab.area);
        if order == 0 {
            self.place(slot, seen, next);
        } else if seen.tree() != next.tree() {
            // The claims of a slot outlast a greater block that has no room beside them.
            match seen.claims() {
                0 => self.place(slot, seen, next),
                _ => self.leave(next, Slot(slot.get())),
            }
        }
        Ok(grab.frame)
    }

    /// Returns the tree where a core begins to search, which is the first of its share.
    pub(crate) fn home(&self, core: u32) -> usize {
        core as usize * self.counters.trees.len() / self.cores as usize
    }

    /// Has the host install memory for a block whose area had none. This comes after the area's
    /// change: either the host sees that change, or the guest's touch meets the host's protection.
    fn install(&self, frame: u64, order: u8, area: Area) {
        if area.is_evicted() {
            self.touch.touch(frame);
            if order > HUGE_ORDER {
                self.touch.touch(frame + AREA_FRAMES);
            }
        }
    }

    /// Allocates a block where a slot is: from its area, even if that is free as a whole by now, or
    /// else from its tree.
    #[inline]
    fn grab_at(&self, tree: usize, slot: Slot, want: Want) -> Option<Grab> {
        let any = Want { whole: true, ..want };
        let own = match want.order {
            0..HUGE_ORDER => self.grab_part(slot.area(), slot.row() % AREA_ROWS, any),
            _ => None,
        };
        own.or_else(|| self.grab_in_tree(tree, want))
    }

    /// Allocates a block from a tree. Below order 9, the fullest areas come first, so that the
    /// others may become free as a whole.
    pub(crate) fn grab_in_tree(&self, tree: usize, want: Want) -> Option<Grab> {
        let first = tree * TREE_AREAS;
        let mut areas = first..(first + TREE_AREAS).min(self.bits.len());
        match want.order {
            HUGE_ORDER => areas.find_map(|index| self.grab_area(index, want)),
            MAX_ORDER.. => areas.step_by(2).find_map(|index| self.grab_pair(index, want)),
            _ => {
                let candidate = |index: usize| {
                    let area = self.counters.area(index)?;
                    let fits = area.has(1 << want.order) && want.may_take(area);
                    fits.then(|| (u32::from(area.free()), index))
                };
                fullest_first(areas.filter_map(candidate))
                    .find_map(|index| self.grab_part(index, 0, want))
            }
        }
    }

    /// Allocates less than an area: first lowers the count, which is a claim, then takes the bits.
    fn grab_part(&self, index: usize, row: usize, want: Want) -> Option<Grab> {
        let frames = 1 << want.order;
        let mut claims = 0;
        let area = self.counters.update(index, |area| {
            let fits = area.has(frames) && want.may_take(area);
            claims = if want.order == 0 { area.free().min(CLAIM_FRAMES) } else { frames };
            fits.then(|| area.minus(claims))
        })?;
        let Some(first) = rows::take(&self.bits[index], row, want.order, area.flip()) else {
            self.give_back(index, claims);
            return None;
        };
        let frame = index as u64 * AREA_FRAMES + first as u64;
        Some(Grab { frame, area, claims: claims - frames })
    }

    fn grab_area(&self, index: usize, want: Want) -> Option<Grab> {
        let area = self.counters.update(index, |area| {
            let fits = area.is_free() && (want.evicted || !area.is_evicted());
            fits.then(|| area.taken())
        })?;
        Some(Grab { frame: index as u64 * AREA_FRAMES, area, claims: 0 })
    }

    /// Allocates two areas. If the second turns out not to be free, it gives back the first.
    fn grab_pair(&self, index: usize, want: Want) -> Option<Grab> {
        let second = self.counters.area(index + 1)?;
        if !second.is_free() {
            return None;
        }
        let first = self.grab_area(index, want)?;
        let Some(second) = self.grab_area(index + 1, want) else {
            self.counters.update(index, |area| area.is_allocated().then(|| area.given_back()));
            return None;
        };
        let area = if second.area.is_evicted() { second.area } else { first.area };
        Some(Grab { area, ..first })
    }

    /// Allocates a given block if it is free. Returns its area's word from before.
    fn take_at(&self, index: usize, frame: u64, order: u8) -> Option<Area> {
        let want = Want { order, kind: KIND_HUGE, core: 0, tree: 0, whole: true, evicted: true };
        if order >= HUGE_ORDER {
            let grab = match order {
                HUGE_ORDER => self.grab_area(index, want),
                _ => self.grab_pair(index, want),
            };
            return Some(grab?.area);
        }
        let frames = 1 << order;
        let area =
            self.counters.update(index, |area| area.has(frames).then(|| area.minus(frames)))?;
        let first = (frame % AREA_FRAMES) as usize;
        if !rows::take_at(&self.bits[index], first, order, area.flip()) {
            self.give_back(index, frames);
            return None;
        }
        Some(area)
    }
}

/// Returns the first row with a free frame, from `start` on and around, or `start` if none has one.
#[inline(always)]
fn first_with_room(rows: &rows::Rows, start: usize, flip: u64) -> usize {
    let mut row = start;
    for _ in 0..AREA_ROWS {
        if rows[row].peek() != !flip {
            break;
        }
        row = (row + 1) % AREA_ROWS;
    }
    row
}
