//! The host's side: reclaims free areas of a guest that it need not trust.
//!
//! It reads and writes only areas and trees, each by one atomic operation. No word that the guest
//! can write serves as an index or as a loop bound, or causes a panic. At worst, the guest's own
//! memory is reclaimed, or is not. The caller must record the state of each area (R) itself: no
//! answer from here is evidence that an area has memory or has none.

use crate::area::Area;
use crate::atomic::{Atom, AtomicU16, AtomicU32};
use crate::counters::Counters;
use crate::error::{HostError, LayoutError};
use crate::layout::{AREA_EVICTED, TREE_AREAS, check_size};
use crate::tree::Tree;

/// Most attempts to change a word. If a word still changes after that many, the guest does nothing
/// else.
const TRIES: usize = 64;
/// Areas that [`Host::free_areas`] looks at together.
pub const CHUNK_AREAS: usize = 64;

/// The host's view of one zone: its areas and trees.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    counters: Counters<'a>,
}

impl<'a> Host<'a> {
    /// Makes a view of a zone. The arrays may be longer than the zone needs.
    ///
    /// # Errors
    /// The size is impossible, or an array is too short for it.
    pub fn new(
        areas: &'a [AtomicU16],
        trees: &'a [AtomicU32],
        frames: u64,
    ) -> Result<Host<'a>, LayoutError> {
        check_size(frames, 1)?;
        Ok(Host { counters: Counters::new(areas, trees, frames)? })
    }

    /// Returns the number of areas.
    pub fn areas(&self) -> usize {
        self.counters.areas.len()
    }

    /// Returns which of the areas from `64 * chunk` on are free as a whole: bit n is area n of the
    /// chunk. It reads two cache lines. The answer is a hint, since areas may change.
    pub fn free_areas(&self, chunk: usize) -> u64 {
        let areas = self.counters.areas.chunks(CHUNK_AREAS).nth(chunk).unwrap_or_default();
        let free = |area: &AtomicU16| u64::from(Area(area.peek()).is_free());
        areas.iter().rev().fold(0, |mask, area| mask << 1 | free(area))
    }

    /// Hard-reclaims a free area: sets A and E in one operation.
    ///
    /// # Errors
    /// The area is in use, or changes all the time.
    pub fn hard_reclaim(&self, index: usize) -> Result<(), HostError> {
        let next = |area: Area| area.is_free().then(|| area.hard_reclaimed());
        self.change(index, next, HostError::InUse)
    }

    /// Returns a hard-reclaimed area to the guest. The area still has no memory.
    ///
    /// # Errors
    /// The guest has changed the area meanwhile, against the rules.
    pub fn return_area(&self, index: usize) -> Result<(), HostError> {
        let hosts = |area: Area| area.is_allocated() && area.is_evicted() && area.free() == 0;
        let next = |area: Area| hosts(area).then(|| area.returned());
        self.change(index, next, HostError::NotTaken)
    }

    /// Sets E of a free area that has no memory, for a guest whose kernel does not know that yet.
    ///
    /// # Errors
    /// The area is in use, or changes all the time.
    pub fn soft_reclaim(&self, index: usize) -> Result<(), HostError> {
        let next = |area: Area| area.is_free().then(|| area.evicted());
        self.change(index, next, HostError::InUse)
    }

    /// Clears E: the area has memory again, or still has it.
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

    /// Adds to a tree's counts. If the guest prevents that, only its own hint is wrong.
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
