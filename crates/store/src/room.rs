//! How much the swap files of a host may take, all together and each, and how much of their file
//! system stays free.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_units::FRAME_BYTES;

use crate::table::{Seat, TableSlot, Word};
use crate::{Medium, StoreError};

/// Divisor of a file system's size: this part stays free if no floor is given.
const FLOOR_PART: u64 = 50;
/// Most bytes that stay free if no floor is given.
const FLOOR_MOST: u64 = 1 << 30;

/// What swap files may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Quota {
    /// Most bytes of all of them together. `None`: no limit.
    pub all_bytes: Option<u64>,
    /// Most bytes of each of them. `None`: no limit.
    pub each_bytes: Option<u64>,
    /// Bytes of their file system that stay free. `None`: a fiftieth of it, 1 GiB at most.
    pub floor_bytes: Option<u64>,
}

impl Quota {
    /// Returns the bytes that stay free of a file system of this size.
    pub fn floor_of(&self, total_bytes: u64) -> u64 {
        self.floor_bytes.unwrap_or_else(|| (total_bytes / FLOOR_PART).min(FLOOR_MOST))
    }
}

/// Why no more is saved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoRoom {
    /// The file system has no more free than must stay free.
    Floor,
    /// All swap files together take what they may.
    All,
    /// This swap file takes what it may.
    Each,
}

/// What a medium takes, and what its file system has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Bytes of its own blocks.
    pub taken_bytes: u64,
    /// Bytes of the file system's free blocks.
    pub free_bytes: u64,
    /// Bytes of all blocks of its file system.
    pub total_bytes: u64,
}

/// The room that the swap files of a host share.
#[derive(Debug)]
pub struct SharedRoom {
    quota: Quota,
    place: TableSlot,
}

impl SharedRoom {
    /// Room that only swap files of this process share. They take nothing yet.
    pub fn new(quota: Quota) -> Arc<SharedRoom> {
        Arc::new(SharedRoom { quota, place: TableSlot::any() })
    }

    /// Room for one swap file. The table says what others take.
    pub fn at(quota: Quota, place: TableSlot) -> Arc<SharedRoom> {
        Arc::new(SharedRoom { quota, place })
    }

    /// Returns the bytes that all swap files take.
    pub fn taken_bytes(&self) -> u64 {
        self.place.table().taken_bytes()
    }
}

/// One swap file's part of the room.
#[derive(Debug)]
pub(crate) struct Part {
    quota: Quota,
    seat: Seat,
    /// The refusals of all swap files that this one knows of.
    refusals: AtomicU64,
}

/// Room for pages that are about to be written.
#[derive(Debug)]
pub(crate) struct Promise<'p> {
    part: &'p Part,
    /// The number of pages.
    pub(crate) pages: u64,
}

impl Part {
    pub(crate) fn new(room: &Arc<SharedRoom>) -> Part {
        let seat = room.place.sit();
        // A killed process no longer writes what it had been promised room for.
        seat.set(Word::Promised, 0);
        let refusals = AtomicU64::new(seat.sum(Word::Refusals));
        Part { quota: room.quota, seat, refusals }
    }

    /// Returns the bytes that the file took when they were last read.
    pub(crate) fn taken_bytes(&self) -> u64 {
        self.seat.get(Word::Taken)
    }

    /// Promises room for up to `most` pages that have none yet.
    pub(crate) fn promise(
        &self,
        medium: &impl Medium,
        most: u64,
    ) -> Result<Promise<'_>, StoreError> {
        let Some(space) = medium.space()? else { return Ok(Promise { part: self, pages: most }) };
        let Quota { all_bytes, each_bytes, .. } = self.quota;
        let floor = self.quota.floor_of(space.total_bytes);
        let wanted = most.saturating_mul(FRAME_BYTES);
        self.seat.set(Word::Taken, space.taken_bytes);
        // Add first, so that of two who ask at once each sees the other: both may get less than
        // there is, and never more.
        self.seat.add(Word::Promised, wanted);
        let promised = self.seat.sum(Word::Promised).saturating_sub(wanted);
        let taken = self.seat.sum(Word::Taken);
        let below = |most: Option<u64>, taken| most.unwrap_or(u64::MAX).saturating_sub(taken);
        let left = [
            // Promises do not count for one swap file: one thread at a time writes to it.
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

    /// Tells the others that this one was refused room and found no other slot.
    pub(crate) fn tell_others(&self, error: &StoreError) {
        if matches!(error, StoreError::NoRoom(NoRoom::All | NoRoom::Floor)) {
            self.refusals.fetch_add(1, Relaxed);
            self.seat.add(Word::Refusals, 1);
        }
    }

    /// Whether another one was refused room since the last call.
    pub(crate) fn is_wanted(&self) -> bool {
        let refusals = self.seat.sum(Word::Refusals);
        self.refusals.swap(refusals, Relaxed) != refusals
    }

    /// Updates how many bytes the file takes.
    pub(crate) fn look(&self, medium: &impl Medium) -> io::Result<()> {
        if let Some(space) = medium.space()? {
            self.seat.set(Word::Taken, space.taken_bytes);
        }
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // The file may stay for another process, which counts it again.
        self.seat.set(Word::Taken, 0);
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.part.seat.subtract(Word::Promised, self.pages * FRAME_BYTES);
    }
}
