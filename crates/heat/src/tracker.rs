//! One round of tracking, by any tracker.

use std::io;

use ebb_units::FrameRange;

/// How a page was used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read, as far as is known.
    Read,
    /// It may have been written: `docs/tiering.md` says what each tracker knows.
    Write,
}

/// What happens to the mark by which a page was found used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The mark is cleared, so that the next use is seen.
    Clear,
    /// The mark stays: the page is at rest and costs the guest nothing.
    Leave,
}

/// Receives what a round finds.
pub trait Observer {
    /// Returns what [`Observer::saw`] would answer, and changes nothing.
    fn would_clear(&self, frames: FrameRange) -> bool;

    /// Notes that these frames, mapped by one entry, were used since their mark was last cleared.
    /// Frames that several entries map are reported several times in a round.
    fn saw(&mut self, frames: FrameRange, access: Access) -> Verdict;
}

/// How far a round looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Walk {
    /// Everything is looked at: a monitoring begins, and earlier uses must not count.
    Full,
    /// Tables that nobody has used since the last round are passed over.
    Pruned,
}

/// What a round looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Round {
    /// Page tables read.
    pub tables: u64,
    /// Page tables not read because the entry above them was not used.
    pub pruned_tables: u64,
    /// Entries found used.
    pub used_entries: u64,
    /// Marks cleared.
    pub cleared_entries: u64,
    /// Marks that should have been cleared, but the guest changed them meanwhile, or their table
    /// could not be written. They are reported again.
    pub missed_entries: u64,
    /// Frames of page metadata protected for a moment.
    pub locked_frames: u64,
    /// Whether the guest has more page tables than a round looks at.
    pub is_truncated: bool,
}

/// Why a round did not take place, or only in part.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// No root of a process's page tables was found.
    #[error("no page tables of processes are found in the guest: only the host's can be watched")]
    NoRoots,
    /// The kernel that was inspected may run no longer.
    #[error("the guest was reset or runs another kernel")]
    NotRunning,
    /// A round did not end in its time.
    #[error("looking at all of its memory takes too long")]
    TooMuch,
    /// Pages that were to be marked have no mark.
    #[error("the host's kernel does not track the use of much of its memory")]
    Unmarked,
    /// An error from the host.
    #[error("the VM's memory cannot be watched: {0}")]
    Host(#[from] io::Error),
}

/// Finds out which pages were used.
pub trait Tracker {
    /// Tells `observer` of every page that was used since the last round, and clears its mark where
    /// the observer says so.
    ///
    /// # Errors
    /// [`TrackError`]. What was reported until then counts, and no mark is lost.
    fn round(&mut self, walk: Walk, observer: &mut dyn Observer) -> Result<Round, TrackError>;
}
