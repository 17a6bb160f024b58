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

/// What a block of less than order 9 is for: the kinds keep to trees of their
/// own. Greater blocks are of a kind by themselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The kernel's own memory, which stays where it is.
    Unmovable = KIND_UNMOVABLE as isize,
    /// Memory of processes, page cache.
    Movable = KIND_MOVABLE as isize,
}

/// Writes to an allocated frame that may have no memory behind it, and comes
/// back when it has. The content is not to be changed.
pub trait Touch {
    /// `frame` counts from the zone's first.
    fn touch(&self, frame: u64);
}

/// Where no host takes memory away.
impl Touch for () {
    fn touch(&self, _frame: u64) {}
}

impl<F: Fn(u64)> Touch for F {
    fn touch(&self, frame: u64) {
        self(frame);
    }
}

/// The arrays of a zone, as [`Counts`] has their lengths; longer ones will do.
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

/// What a new zone's frames are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    /// All of them free.
    Free,
    /// All of them allocated: those that exist are to be put.
    Allocated,
}

/// The guest's side. Frames count from the zone's first.
pub struct Zone<'a, T = ()> {
    pub(crate) bits: &'a [Rows],
    pub(crate) counters: Counters<'a>,
    pub(crate) slots: &'a [[AtomicU64; SLOT_WORDS]],
    pub(crate) frames: u64,
    pub(crate) cores: u32,
    pub(crate) touch: T,
}

impl<'a, T: Touch> Zone<'a, T> {
    /// Over state that is there already, or is to be made ([`Zone::format`]).
    ///
    /// # Errors
    /// A size that cannot be, or an array too short for it.
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

    /// Writes all of the state; nobody uses it yet.
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

    /// Frames that the last area lacks are allocated for ever.
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

    /// Frames that the zone spans.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Free frames; exact while nothing changes.
    pub fn free_frames(&self) -> u64 {
        let areas = self.counters.areas.iter().map(|area| u64::from(Area(area.get()).free()));
        let slots = self.slots.iter().map(|slot| u64::from(Slot(slot[0].get()).claims()));
        areas.sum::<u64>() + slots.sum::<u64>()
    }

    /// Areas that are free as a whole; exact while nothing changes.
    pub fn free_areas(&self) -> usize {
        self.counters.areas.iter().filter(|area| Area(area.get()).is_free()).count()
    }

    /// Whether every frame of a block is free at this moment.
    ///
    /// # Errors
    /// No such block.
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

    /// That a block can be in the zone.
    #[inline(always)]
    pub(crate) fn check(&self, frame: u64, order: u8) -> Result<(), Error> {
        if order > MAX_ORDER {
            return Err(Error::Order);
        }
        let size = 1u64 << order;
        let fits = frame < self.frames && size <= self.frames - frame && frame & (size - 1) == 0;
        if fits { Ok(()) } else { Err(Error::Frame) }
    }

    /// The slot of a core; any number will do for one.
    #[inline(always)]
    pub(crate) fn slot(&self, core: u32, kind: u32) -> &AtomicU64 {
        let core = if core < self.cores { core } else { core % self.cores };
        &self.slots[core as usize * SLOT_KINDS + kind as usize][0]
    }
}
