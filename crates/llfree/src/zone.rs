//! A zone: a range of frames and the words that tell which of them are free.

use crate::area::Area;
use crate::atomic::{Atom, AtomicU16, AtomicU32, AtomicU64};
use crate::counters::Counters;
use crate::error::{Error, LayoutError};
use crate::layout::{
    AREA_FRAMES, AREA_INVERTED, Counts, KIND_MOVABLE, KIND_UNMOVABLE, MAX_ORDER, ROW_FRAMES,
    SLOT_KINDS, SLOT_WORDS, TREE_AREAS, check_size,
};
use crate::rows::{self, Rows};
use crate::slot::Slot;
use crate::tree::Tree;

/// Purpose of a block of order less than 9. Each kind uses trees of its own. Greater blocks have a
/// kind of their own, [`KIND_HUGE`](crate::layout::KIND_HUGE).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Kernel memory that stays where it is.
    Unmovable = KIND_UNMOVABLE as isize,
    /// Memory of processes, page cache.
    Movable = KIND_MOVABLE as isize,
}

/// Gives memory to an allocated frame that may have none: writes to it, and returns once it has
/// memory. The write does not change the content.
pub trait Touch {
    /// Touches `frame`, counted from the zone's first.
    fn touch(&self, frame: u64);
}

/// Does nothing: for zones that no host reclaims from.
impl Touch for () {
    fn touch(&self, _frame: u64) {}
}

impl<F: Fn(u64)> Touch for F {
    fn touch(&self, frame: u64) {
        self(frame);
    }
}

/// Arrays of a zone. Each has at least the length that [`Counts`] says.
#[derive(Clone, Copy)]
pub struct Parts<'a> {
    /// The bit field.
    pub bits: &'a [AtomicU64],
    /// The areas.
    pub areas: &'a [AtomicU16],
    /// The trees.
    pub trees: &'a [AtomicU32],
    /// The reservation slots.
    pub slots: &'a [AtomicU64],
}

/// Initial state of a new zone's frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    /// All frames are free.
    Free,
    /// All frames are allocated; the guest then puts those that exist.
    Allocated,
}

/// The guest's side of a zone. Frames count from the zone's first.
pub struct Zone<'a, T = ()> {
    pub(crate) bits: &'a [Rows],
    pub(crate) counters: Counters<'a>,
    pub(crate) slots: &'a [[AtomicU64; SLOT_WORDS]],
    pub(crate) frames: u64,
    pub(crate) cores: u32,
    pub(crate) touch: T,
}

impl<'a, T: Touch> Zone<'a, T> {
    /// Makes a zone over state that exists, or that [`Zone::format`] is about to write.
    ///
    /// # Errors
    /// The size is impossible, or an array is too short for it.
    pub fn new(
        parts: Parts<'a>,
        frames: u64,
        cores: u32,
        touch: T,
    ) -> Result<Zone<'a, T>, LayoutError> {
        check_size(frames, cores)?;
        let counts = Counts::new(frames, cores);
        let bits = parts.bits.get(..counts.rows).ok_or(LayoutError::Short)?.as_chunks().0;
        let slots = parts.slots.get(..counts.slot_words).ok_or(LayoutError::Short)?.as_chunks().0;
        let counters = Counters::new(parts.areas, parts.trees, frames)?;
        Ok(Zone { bits, counters, slots, frames, cores, touch })
    }

    /// Writes the whole state. Nobody may use the zone yet.
    pub fn format(&self, fill: Fill) {
        self.bits.iter().flatten().for_each(|row| row.set(0));
        self.slots.iter().for_each(|slot| slot[0].set(Slot::NONE.0));
        for index in 0..self.counters.areas.len() {
            let area = self.first_state(index, fill);
            self.counters.areas[index].set(area.0);
        }
        for (tree, areas) in self.counters.trees.iter().zip(self.counters.areas.chunks(TREE_AREAS))
        {
            let free: u32 = areas.iter().map(|area| Area(area.get()).steps()).sum();
            tree.set(Tree(0).shift(free as i32, 0).0);
        }
    }

    /// Writes the bits of an area if needed, and returns its first word. Frames that a short last
    /// area lacks are allocated for ever.
    fn first_state(&self, index: usize, fill: Fill) -> Area {
        let frames = (self.frames - index as u64 * AREA_FRAMES).min(AREA_FRAMES);
        match fill {
            Fill::Free if frames == AREA_FRAMES => Area::FREE,
            Fill::Free => {
                for (row, first) in self.bits[index].iter().zip((0..).step_by(ROW_FRAMES as usize))
                {
                    let free = frames.saturating_sub(first).min(ROW_FRAMES);
                    row.set(u64::MAX.checked_shl(free as u32).unwrap_or(0));
                }
                Area(frames as u16)
            }
            Fill::Allocated if frames == AREA_FRAMES => Area::FREE.taken(),
            Fill::Allocated => Area(AREA_INVERTED),
        }
    }

    /// Returns the number of frames that the zone spans.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Returns the number of free frames. It is exact while nothing changes.
    pub fn free_frames(&self) -> u64 {
        let areas = self.counters.areas.iter().map(|area| u64::from(Area(area.get()).free()));
        let slots = self.slots.iter().map(|slot| u64::from(Slot(slot[0].get()).claims()));
        areas.sum::<u64>() + slots.sum::<u64>()
    }

    /// Returns the number of areas that are free as a whole. It is exact while nothing changes.
    pub fn free_areas(&self) -> usize {
        self.counters.areas.iter().filter(|area| Area(area.get()).is_free()).count()
    }

    /// Whether every frame of a block is free at this moment.
    ///
    /// # Errors
    /// There is no such block.
    pub fn is_free(&self, frame: u64, order: u8) -> Result<bool, Error> {
        self.check(frame, order)?;
        let index = (frame / AREA_FRAMES) as usize;
        let last = if order == MAX_ORDER { index + 1 } else { index };
        let first = (frame % AREA_FRAMES) as usize;
        Ok((index..=last).all(|index| {
            let area = Area(self.counters.areas[index].get());
            let free = rows::is_free(&self.bits[index], first, order.min(9), area.flip());
            free && !area.is_allocated()
        }))
    }

    /// Checks that the zone can have such a block.
    #[inline(always)]
    pub(crate) fn check(&self, frame: u64, order: u8) -> Result<(), Error> {
        if order > MAX_ORDER {
            return Err(Error::Order);
        }
        let size = 1u64 << order;
        let fits = frame < self.frames && size <= self.frames - frame && frame & (size - 1) == 0;
        if fits { Ok(()) } else { Err(Error::Frame) }
    }

    /// Returns whose slots a core uses: its own, or those of core 0 if all cores share them. A
    /// number past the last core wraps around.
    #[inline(always)]
    pub(crate) fn slots_of(&self, core: u32) -> u32 {
        match self.cores {
            // No division where all cores share the slots, as in most zones.
            1 => 0,
            cores if core < cores => core,
            cores => core % cores,
        }
    }

    /// Returns a core's slot for a kind. `core` is of [`Zone::slots_of`].
    #[inline(always)]
    pub(crate) fn slot(&self, core: u32, kind: u32) -> &AtomicU64 {
        &self.slots[core as usize * SLOT_KINDS + kind as usize][0]
    }
}
