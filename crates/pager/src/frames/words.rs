//! Holding words of the ledger, and trying again where somebody else holds them.

use ebb_ledger::Content;
use std::io;
use std::thread::{self};
use std::time::Duration;

use ebb_ledger::Locked;
use ebb_units::{FrameRange, Gfn};

use crate::frames::Frames;

/// An ordinary emptied frame.
pub(crate) const EMPTY: Content = Content::Empty { fill: 0, hard: false };

/// A word that its holder does not let go of in so many looks is an error.
pub(crate) const ATTEMPTS: usize = 50_000;
/// After so many, with a pause: an eviction holds its words for some 10 ms.
const EAGER_ATTEMPTS: usize = 100;
const PAUSE: Duration = Duration::from_micros(100);
/// Some milliseconds: for a device that asks again by itself.
pub(crate) const SOON_ATTEMPTS: usize = EAGER_ATTEMPTS + 10;

/// What became of one attempt.
pub(crate) enum Served {
    /// Resolved, or marked for its holder.
    Done,
    /// The word is held for a moment; ask again.
    Busy,
}

impl Served {
    pub(crate) fn done((): ()) -> Served {
        Served::Done
    }
}

/// Attempts it until it is done, for as long as any holder of a word may take.
pub(crate) fn again(attempt: impl FnMut() -> io::Result<Served>) -> io::Result<()> {
    again_for(ATTEMPTS, attempt)
}

/// The same, so often at most.
pub(crate) fn again_for(
    attempts_max: usize,
    mut attempt: impl FnMut() -> io::Result<Served>,
) -> io::Result<()> {
    for attempts in 0..attempts_max {
        match attempt()? {
            Served::Done => return Ok(()),
            Served::Busy if attempts < EAGER_ATTEMPTS => thread::yield_now(),
            Served::Busy => thread::sleep(PAUSE),
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "a frame is held and not let go"))
}

impl Frames {
    /// Holds the word that speaks for a frame: its own, or that of its huge frame.
    pub(crate) fn hold_word_of(&self, gfn: Gfn) -> Option<Locked<'_>> {
        let words = match self.ledger.is_split(gfn.huge()) {
            true => FrameRange::new(gfn, 1),
            false => FrameRange::huge(gfn.huge()),
        };
        self.hold_words(words)
    }

    /// Holds all of these words, or none: then whoever asked for one meanwhile asks again.
    pub(crate) fn hold_words(&self, words: FrameRange) -> Option<Locked<'_>> {
        let held = self.ledger.lock(words);
        held.inspect_err(|busy| self.after(busy.wanted, words)).ok()
    }
}
