//! How much the swap files of a host may take, together and each, and what of their file system
//! is never used.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_units::FRAME_BYTES;

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
    sums: Mutex<Sums>,
    /// How often somebody has found no room in what all share.
    refusals: AtomicU64,
}

#[derive(Default, Debug)]
struct Sums {
    /// By all files, when each was last looked at.
    taken_bytes: u64,
    /// To writes under way.
    promised_bytes: u64,
}

impl Room {
    /// Nothing is taken yet.
    pub fn new(quota: Quota) -> Arc<Room> {
        Arc::new(Room { quota, sums: Mutex::default(), refusals: AtomicU64::new(0) })
    }

    /// What all swap files take.
    pub fn taken_bytes(&self) -> u64 {
        self.sums().taken_bytes
    }

    fn sums(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one swap file has of it.
#[derive(Debug)]
pub(crate) struct Part {
    room: Arc<Room>,
    /// What it took when it was last looked at; changed with the sums locked.
    taken: Mutex<u64>,
    /// Of the room's refusals so many are known.
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
        let refusals = AtomicU64::new(room.refusals.load(Relaxed));
        Part { room: Arc::clone(room), taken: Mutex::new(0), refusals }
    }

    /// What the file took when it was last looked at.
    pub(crate) fn taken_bytes(&self) -> u64 {
        *self.taken()
    }

    /// Room for up to `most` pages, none of which has any yet.
    pub(crate) fn promise(
        &self,
        medium: &impl Medium,
        most: u64,
    ) -> Result<Promise<'_>, StoreError> {
        let Some(space) = medium.space()? else { return Ok(Promise { part: self, pages: most }) };
        let Quota { all_bytes, each_bytes, floor_bytes } = self.room.quota;
        let floor = floor_bytes.unwrap_or_else(|| (space.total_bytes / FLOOR_PART).min(FLOOR_MOST));
        let mut sums = self.count(space);
        let below = |most: Option<u64>, taken| most.unwrap_or(u64::MAX).saturating_sub(taken);
        let promised = sums.promised_bytes;
        let left = [
            // One thread at a time writes to it.
            (below(each_bytes, space.taken_bytes), NoRoom::Each),
            (below(all_bytes, sums.taken_bytes + promised), NoRoom::All),
            (below(Some(space.free_bytes), floor.saturating_add(promised)), NoRoom::Floor),
        ];
        let tightest = left.into_iter().min_by_key(|(bytes, _)| *bytes);
        let (bytes, why) = tightest.unwrap_or((0, NoRoom::Floor));
        match most.min(bytes / FRAME_BYTES) {
            0 => Err(StoreError::NoRoom(why)),
            pages => {
                sums.promised_bytes += pages * FRAME_BYTES;
                Ok(Promise { part: self, pages })
            }
        }
    }

    /// It was refused, and has found no other way: the others are to know, it does.
    pub(crate) fn tell_others(&self, error: &StoreError) {
        if matches!(error, StoreError::NoRoom(NoRoom::All | NoRoom::Floor)) {
            self.refusals.fetch_add(1, Relaxed);
            self.room.refusals.fetch_add(1, Relaxed);
        }
    }

    /// Whether another one was refused room since this was asked last.
    pub(crate) fn is_wanted(&self) -> bool {
        let refusals = self.room.refusals.load(Relaxed);
        self.refusals.swap(refusals, Relaxed) != refusals
    }

    /// Looks at what the file takes now.
    pub(crate) fn look(&self, medium: &impl Medium) -> io::Result<()> {
        if let Some(space) = medium.space()? {
            drop(self.count(space));
        }
        Ok(())
    }

    fn count(&self, space: Space) -> MutexGuard<'_, Sums> {
        let mut sums = self.room.sums();
        let before = std::mem::replace(&mut *self.taken(), space.taken_bytes);
        sums.taken_bytes = (sums.taken_bytes + space.taken_bytes).saturating_sub(before);
        sums
    }

    fn taken(&self) -> MutexGuard<'_, u64> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // The file may stay for another daemon, which counts it anew.
        let taken = *self.taken();
        let mut sums = self.room.sums();
        sums.taken_bytes = sums.taken_bytes.saturating_sub(taken);
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        let mut sums = self.part.room.sums();
        sums.promised_bytes = sums.promised_bytes.saturating_sub(self.pages * FRAME_BYTES);
    }
}
