//! Locking words of the ledger, and trying again where another thread has locked them.

use ebb_ledger::Content;
use std::io;
use std::thread::{self};
use std::time::Duration;

use ebb_ledger::Locked;
use ebb_units::{FrameRange, Gfn};

use crate::frames::Frames;

/// The content of an ordinary empty frame.
pub(crate) const EMPTY: Content = Content::Empty { fill: 0, hard: false };

/// Most looks at a locked word; a word that is still locked then is an error.
pub(crate) const ATTEMPTS: usize = 50_000;
/// Number of attempts without a pause; later attempts pause. An eviction holds its locks for some
/// 10 ms.
const EAGER_ATTEMPTS: usize = 100;
const PAUSE: Duration = Duration::from_micros(100);
/// Number of attempts for a device that asks again by itself: some milliseconds.
pub(crate) const SOON_ATTEMPTS: usize = EAGER_ATTEMPTS + 10;

/// The result of one attempt.
pub(crate) enum Served {
    /// Resolved, or marked for the holder of the lock.
    Done,
    /// The word is locked for a moment; ask again.
    Busy,
}

impl Served {
    pub(crate) fn done((): ()) -> Served {
        Served::Done
    }
}

/// Repeats an attempt until it is done, for as long as any holder may keep a word locked.
pub(crate) fn again(attempt: impl FnMut() -> io::Result<Served>) -> io::Result<()> {
    again_for(ATTEMPTS, attempt)
}

/// As [`again`], at most `attempts_max` times.
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
    Err(io::Error::new(io::ErrorKind::TimedOut, "a frame stays locked"))
}

impl Frames {
    /// Locks the word that stands for a frame: its own, or that of its huge frame.
    pub(crate) fn lock_word_of(&self, gfn: Gfn) -> Option<Locked<'_>> {
        let words = match self.ledger.is_split(gfn.huge()) {
            true => FrameRange::new(gfn, 1),
            false => FrameRange::huge(gfn.huge()),
        };
        self.lock_words(words)
    }

    /// Locks all of these words, or none: then touches that were marked meanwhile are woken, and
    /// fault again.
    pub(crate) fn lock_words(&self, words: FrameRange) -> Option<Locked<'_>> {
        let held = self.ledger.lock(words);
        held.inspect_err(|busy| self.after(busy.wanted, words)).ok()
    }
}
