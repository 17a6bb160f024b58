//! One round of tracking, whoever does it.

use std::io;

use ebb_units::FrameRange;

/// How a page was used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read, as far as can be told.
    Read,
    /// It can have been written: see `docs/tiering.md` for what each tracker knows.
    Write,
}

/// What becomes of the mark by which a page was found used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It is cleared, so that the next use is seen.
    Clear,
    /// It stays: the page is at rest and costs the guest nothing.
    Leave,
}

/// Who is told what a round finds.
pub trait Observer {
    /// What [`Observer::saw`] would answer, told of nothing.
    fn would_clear(&self, frames: FrameRange) -> bool;

    /// These frames, mapped by one entry, were used since their mark was last cleared. What
    /// several entries map is told several times in a round.
    fn saw(&mut self, frames: FrameRange, access: Access) -> Verdict;
}

/// How far a round looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Walk {
    /// At everything: a monitoring begins, and what was used before is not to count.
    Full,
    /// Past what nobody has used since the last round.
    Pruned,
}

/// What a round looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Round {
    /// Page tables read.
    pub tables: u64,
    /// Page tables not read, since the entry above was not used.
    pub pruned_tables: u64,
    /// Entries found used.
    pub used_entries: u64,
    /// Marks cleared.
    pub cleared_entries: u64,
    /// Marks to be cleared that the guest changed meanwhile, or whose table was not to be
    /// had: they are told again.
    pub missed_entries: u64,
    /// Frames of page metadata protected for a moment.
    pub held_frames: u64,
    /// The guest has more page tables than are looked at.
    pub is_truncated: bool,
}

/// Why a round did not take place, or not as a whole.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// No root of a process's page tables was found.
    #[error("no page tables of processes are found in the guest: only the host's can be watched")]
    NoRoots,
    /// The kernel that was inspected may run no more.
    #[error("the guest was reset or runs another kernel")]
    NotRunning,
    /// A round did not come to its end in its time.
    #[error("looking at all of its memory takes too long")]
    TooMuch,
    /// Pages that were marked have no mark.
    #[error("the kernel keeps no marks of much of its memory")]
    Unmarked,
    /// From the host.
    #[error("the VM's memory cannot be watched: {0}")]
    Host(#[from] io::Error),
}

/// Finds out which pages are used.
pub trait Tracker {
    /// Tells `observer` of every page that was used since the last round, and clears what
    /// tells of it where the observer says so.
    ///
    /// # Errors
    /// [`TrackError`]. What was told until then was told; no mark is lost.
    fn round(&mut self, walk: Walk, observer: &mut dyn Observer) -> Result<Round, TrackError>;
}
