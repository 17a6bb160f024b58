//! How much the swap files of a host may take, together and each, and what of their file system
//! is never used.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_units::FRAME_BYTES;

use crate::table::{Place, Seat, Word};
use crate::{Medium, StoreError};

/// The largest part of a file system that stays free where no floor was named,
const FLOOR_PART: u64 = 50;
/// and the most of it.
const FLOOR_MOST: u64 = 1 << 30;

/// What swap files may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Quota {
    /// All of them together; none: as much as there is.
    pub all_bytes: Option<u64>,
    /// Each of them.
    pub each_bytes: Option<u64>,
    /// So much of their file system stays free; none: a fiftieth, 1 GiB at most.
    pub floor_bytes: Option<u64>,
}

/// Why no more is saved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoRoom {
    /// So little of the file system is free as is to stay free.
    Floor,
    /// All swap files take what they may.
    All,
    /// This one does.
    Each,
}

/// What a medium takes, and what is left where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Blocks of its own.
    pub taken_bytes: u64,
    /// Blocks that are free.
    pub free_bytes: u64,
    /// All blocks of its file system.
    pub total_bytes: u64,
}

/// The room that the swap files of a host share.
#[derive(Debug)]
pub struct Room {
    quota: Quota,
    place: Place,
}

impl Room {
    /// Nothing is taken yet. Only swap files of this process share it.
    pub fn new(quota: Quota) -> Arc<Room> {
        Arc::new(Room { quota, place: Place::any() })
    }

    /// For one swap file; what others take stands in the table.
    pub fn at(quota: Quota, place: Place) -> Arc<Room> {
        Arc::new(Room { quota, place })
    }

    /// What all swap files take.
    pub fn taken_bytes(&self) -> u64 {
        self.place.table().taken_bytes()
    }
}

/// What one swap file has of it.
#[derive(Debug)]
pub(crate) struct Part {
    quota: Quota,
    seat: Seat,
    /// Of all refusals so many are known.
    refusals: AtomicU64,
}

/// Room for pages that are about to be written.
#[derive(Debug)]
pub(crate) struct Promise<'p> {
    part: &'p Part,
    /// For so many.
    pub(crate) pages: u64,
}

impl Part {
    pub(crate) fn new(room: &Arc<Room>) -> Part {
        let seat = room.place.sit();
        // What a process that was killed had promised is not written.
        seat.set(Word::Promised, 0);
        let refusals = AtomicU64::new(seat.sum(Word::Refusals));
        Part { quota: room.quota, seat, refusals }
    }

    /// What the file took when it was last looked at.
    pub(crate) fn taken_bytes(&self) -> u64 {
        self.seat.get(Word::Taken)
    }

    /// Room for up to `most` pages, none of which has any yet.
    pub(crate) fn promise(
        &self,
        medium: &impl Medium,
        most: u64,
    ) -> Result<Promise<'_>, StoreError> {
        let Some(space) = medium.space()? else { return Ok(Promise { part: self, pages: most }) };
        let Quota { all_bytes, each_bytes, floor_bytes } = self.quota;
        let floor = floor_bytes.unwrap_or_else(|| (space.total_bytes / FLOOR_PART).min(FLOOR_MOST));
        let wanted = most.saturating_mul(FRAME_BYTES);
        self.seat.set(Word::Taken, space.taken_bytes);
        // First, so that of two who ask at once each sees the other: both may get less than there is,
        // and never more.
        self.seat.add(Word::Promised, wanted);
        let promised = self.seat.sum(Word::Promised).saturating_sub(wanted);
        let taken = self.seat.sum(Word::Taken);
        let below = |most: Option<u64>, taken| most.unwrap_or(u64::MAX).saturating_sub(taken);
        let left = [
            // One thread at a time writes to it.
            (below(each_bytes, space.taken_bytes), NoRoom::Each),
            (below(all_bytes, taken.saturating_add(promised)), NoRoom::All),
            (below(Some(space.free_bytes), floor.saturating_add(promised)), NoRoom::Floor),
        ];
        let tightest = left.into_iter().min_by_key(|(bytes, _)| *bytes);
        let (bytes, why) = tightest.unwrap_or((0, NoRoom::Floor));
        let pages = most.min(bytes / FRAME_BYTES);
        self.seat.subtract(Word::Promised, wanted.saturating_sub(pages * FRAME_BYTES));
        match pages {
            0 => Err(StoreError::NoRoom(why)),
            pages => Ok(Promise { part: self, pages }),
        }
    }

    /// It was refused, and has found no other way: the others are to know, it does.
    pub(crate) fn tell_others(&self, error: &StoreError) {
        if matches!(error, StoreError::NoRoom(NoRoom::All | NoRoom::Floor)) {
            self.refusals.fetch_add(1, Relaxed);
            self.seat.add(Word::Refusals, 1);
        }
    }

    /// Whether another one was refused room since this was asked last.
    pub(crate) fn is_wanted(&self) -> bool {
        let refusals = self.seat.sum(Word::Refusals);
        self.refusals.swap(refusals, Relaxed) != refusals
    }

    /// Looks at what the file takes now.
    pub(crate) fn look(&self, medium: &impl Medium) -> io::Result<()> {
        if let Some(space) = medium.space()? {
            self.seat.set(Word::Taken, space.taken_bytes);
        }
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // The file may stay for another process, which counts it anew.
        self.seat.set(Word::Taken, 0);
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.part.seat.subtract(Word::Promised, self.pages * FRAME_BYTES);
    }
}
