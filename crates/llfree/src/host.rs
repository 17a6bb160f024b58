//! The host's side: takes free areas of a guest that it need not trust.
//!
//! It reads and writes areas and trees only, each by one atomic operation.
//! Whatever the guest writes there, nothing here indexes by it, loops by it or
//! panics; the worst that the guest gets is its own memory taken, or not.
//! What an area is to the host is for the host to remember: no answer here is
//! a reason to think that an area has memory or has none.

use crate::area::Area;
use crate::atomic::{Atom, AtomicU16, AtomicU32};
use crate::counters::Counters;
use crate::error::{HostError, LayoutError};
use crate::layout::{AREA_EVICTED, TREE_AREAS, check_size};
use crate::tree::Tree;

/// A word that changes so often while it is looked at belongs to a guest that
/// does nothing else.
const TRIES: usize = 64;
/// Areas that [`Host::free_areas`] looks at together.
pub const CHUNK_AREAS: usize = 64;

/// The areas and trees of one zone.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    counters: Counters<'a>,
}

impl<'a> Host<'a> {
    /// The arrays may be longer than the zone needs.
    ///
    /// # Errors
    /// A size that cannot be, or an array too short for it.
    pub fn new(
        areas: &'a [AtomicU16],
        trees: &'a [AtomicU32],
        frames: u64,
    ) -> Result<Host<'a>, LayoutError> {
        check_size(frames, 1)?;
        Ok(Host { counters: Counters::new(areas, trees, frames)? })
    }

    /// How many areas there are.
    pub fn areas(&self) -> usize {
        self.counters.areas.len()
    }

    /// Which of the areas `64 * chunk ..` are free as a whole: bit n is area n
    /// of the chunk. Two cache lines; no verdict, since it may change.
    pub fn free_areas(&self, chunk: usize) -> u64 {
        let areas = self.counters.areas.chunks(CHUNK_AREAS).nth(chunk).unwrap_or_default();
        let free = |area: &AtomicU16| u64::from(Area(area.peek()).is_free());
        areas.iter().rev().fold(0, |mask, area| mask << 1 | free(area))
    }

    /// Takes a free area from the guest (A and E, in one operation).
    ///
    /// # Errors
    /// It is in use, or changes all the time.
    pub fn hard_reclaim(&self, index: usize) -> Result<(), HostError> {
        let next = |area: Area| area.is_free().then(|| area.hard_reclaimed());
        self.change(index, next, HostError::InUse)
    }

    /// Lets the guest have the area again; there is no memory behind it yet.
    ///
    /// # Errors
    /// The guest has changed it meanwhile, against the rules.
    pub fn return_area(&self, index: usize) -> Result<(), HostError> {
        let hosts = |area: Area| area.is_allocated() && area.is_evicted() && area.free() == 0;
        let next = |area: Area| hosts(area).then(|| area.returned());
        self.change(index, next, HostError::NotTaken)
    }

    /// Tells the guest that a free area has no memory (E), before it is taken.
    /// Then protect it, and take it only if [`Host::is_still_free`].
    ///
    /// # Errors
    /// It is in use, or changes all the time.
    pub fn soft_reclaim(&self, index: usize) -> Result<(), HostError> {
        let next = |area: Area| area.is_free().then(|| area.evicted());
        self.change(index, next, HostError::InUse)
    }

    /// After [`Host::soft_reclaim`] and the protection of the frames: whoever
    /// gets one of them from now on meets the protection.
    pub fn is_still_free(&self, index: usize) -> bool {
        self.counters.area(index).is_some_and(|area| area.is_free() && area.is_evicted())
    }

    /// There is memory again, or still (E is cleared).
    pub fn install(&self, index: usize) {
        let Some(area) = self.counters.areas.get(index) else { return };
        let before = Area(clear_evicted(area));
        if before.is_evicted() {
            self.shift(index, 0, -1);
        }
    }

    fn change(
        &self,
        index: usize,
        next: impl Fn(Area) -> Option<Area>,
        refused: HostError,
    ) -> Result<(), HostError> {
        let mut seen = self.counters.area(index).ok_or(HostError::Outside)?;
        for _ in 0..TRIES {
            let after = next(seen).ok_or(refused)?;
            match self.counters.replace(index, seen, after) {
                Ok(()) => {
                    self.count(index, seen, after);
                    return Ok(());
                }
                Err(now) => seen = now,
            }
        }
        Err(HostError::Busy)
    }

    fn count(&self, index: usize, before: Area, after: Area) {
        let frames = after.steps() as i32 - before.steps() as i32;
        let evicted = i32::from(after.is_evicted()) - i32::from(before.is_evicted());
        self.shift(index, frames, evicted);
    }

    /// A guest that keeps the host from counting has a wrong hint, no more.
    fn shift(&self, index: usize, frames: i32, evicted: i32) {
        let Some(tree) = self.counters.trees.get(index / TREE_AREAS) else { return };
        if (frames, evicted) == (0, 0) {
            return;
        }
        let mut seen = tree.get();
        for _ in 0..TRIES {
            match tree.replace(seen, Tree(seen).shift(frames, evicted).0) {
                Ok(()) => return,
                Err(now) => seen = now,
            }
        }
    }
}

fn clear_evicted(area: &AtomicU16) -> u16 {
    area.fetch_and(!AREA_EVICTED, core::sync::atomic::Ordering::AcqRel)
}
