//! The words of all frames, looked up by frame number.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, HugeFrame};

use crate::content::{Content, LOCK, MIXED, WANT, is_mixed};
use crate::entry::{Want, Word, try_lock, unlock, want};
use crate::file::{LedgerError, Tables, Words};
use crate::locked::{Busy, Locked, LockedFrame};

/// The frames of a huge frame have no words of their own.
#[derive(Debug, thiserror::Error)]
pub enum SplitError {
    /// Somebody holds the huge frame.
    #[error("somebody holds the huge frame")]
    Busy,
    /// The file system of the ledger has no room for their words.
    #[error("the ledger: {0}")]
    NoRoom(#[source] io::Error),
}

/// The ledger of one VM, for guest-physical memory from 0 up.
pub struct Ledger {
    words: Words,
}

impl Ledger {
    /// A new ledger file for frames below `end`; everything is resident.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn create(path: &Path, end: Gfn, tables: Tables) -> Result<Ledger, LedgerError> {
        Ok(Ledger { words: Words::create(path, huge_count(end), tables)? })
    }

    /// The ledger that a daemon before this one left. Locks and marks of its
    /// threads are still in it: see [`Ledger::recover`].
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn open(path: &Path, end: Gfn) -> Result<Ledger, LedgerError> {
        Ok(Ledger { words: Words::open(path, huge_count(end))? })
    }

    /// Where the frame's content is; a frame beyond the end is resident.
    pub fn content(&self, gfn: Gfn) -> Content {
        let word = self.word(gfn).map_or(0, |word| word.load(Acquire));
        // A word that is not ours (see `recover`) is read as the state in
        // which nothing is taken from the guest and nothing put in its place.
        Content::from_word(word).unwrap_or(Content::Resident)
    }

    /// The same, unless somebody holds it.
    pub fn unlocked(&self, gfn: Gfn) -> Option<Content> {
        let Some(word) = self.word(gfn) else { return Some(Content::Resident) };
        let word = word.load(Acquire);
        match word & LOCK {
            // A word that says nothing is one that was split just now.
            0 => Content::from_word(word),
            _ => None,
        }
    }

    /// As the fault thread: marks the frame where somebody holds it.
    pub fn want(&self, gfn: Gfn) -> Want {
        loop {
            match self.word(gfn).map(want) {
                None => return Want::Free(Content::Resident),
                Some(Some(answer)) => return answer,
                Some(None) if self.is_split(gfn.huge()) => {}
                // Nothing but a split leaves a word that says nothing, and it
                // lasts 512 stores.
                Some(None) => std::hint::spin_loop(),
            }
        }
    }

    /// Locks all frames of a range that lies in one huge frame. A part of a
    /// huge frame must have been split off before.
    ///
    /// # Errors
    /// [`Busy`]: somebody holds a part of it, or it is not split. Nothing is
    /// held then.
    pub fn lock(&self, frames: FrameRange) -> Result<Locked<'_>, Busy> {
        let huge = frames.start.huge();
        let words = match self.is_split(huge) {
            true => {
                let first = frames.start.index_in_huge();
                let last = first + frames.count as usize;
                self.table(huge).and_then(|table| table.get(first..last)).ok_or(Busy::UNTOUCHED)?
            }
            false if frames.count == FRAMES_PER_HUGE && frames.start == huge.first() => {
                std::slice::from_ref(self.huge(huge).ok_or(Busy::UNTOUCHED)?)
            }
            false => return Err(Busy::UNTOUCHED),
        };
        Locked::take(words, frames)
    }

    /// Locks one frame of a huge frame that is split.
    ///
    /// # Errors
    /// As [`Ledger::lock`].
    pub fn lock_frame(&self, gfn: Gfn) -> Result<LockedFrame<'_>, Busy> {
        if !self.is_split(gfn.huge()) {
            return Err(Busy::UNTOUCHED);
        }
        let word = self.word(gfn).ok_or(Busy::UNTOUCHED)?;
        try_lock(word).map(|before| LockedFrame::new(word, before)).ok_or(Busy::UNTOUCHED)
    }

    /// Gives each frame of a huge frame its own word; it stays so. `true`:
    /// somebody asked for one of them meanwhile and must be woken to ask again.
    ///
    /// # Errors
    /// [`SplitError`]; the huge frame keeps its one word.
    pub fn split(&self, huge: HugeFrame) -> Result<bool, SplitError> {
        let word = self.huge(huge).ok_or(SplitError::Busy)?;
        if is_mixed(word.load(Acquire)) {
            return Ok(false);
        }
        // Before the lock: what is reserved is no word yet, and nobody waits meanwhile.
        self.words.reserve_table(huge.0).map_err(SplitError::NoRoom)?;
        let before = try_lock(word).ok_or(SplitError::Busy)?;
        if is_mixed(before) {
            return Ok(unlock(word, MIXED));
        }
        for base in self.words.table(huge.0) {
            base.store(before, Relaxed);
        }
        Ok(unlock(word, MIXED))
    }

    /// Whether the frames of this huge frame have words of their own.
    pub fn is_split(&self, huge: HugeFrame) -> bool {
        self.huge(huge).is_some_and(|word| is_mixed(word.load(Acquire)))
    }

    /// Every run of frames that is not resident, in order; runs end at
    /// huge-frame borders. A snapshot where nobody works on the ledger.
    pub fn runs(&self) -> impl Iterator<Item = (FrameRange, Content)> {
        self.words
            .huge()
            .iter()
            .enumerate()
            .flat_map(|(index, word)| {
                let huge = HugeFrame(index as u64);
                let value = word.load(Acquire);
                let (whole, parts) = match is_mixed(value) {
                    false => (Content::from_word(value).map(|c| (FrameRange::huge(huge), c)), None),
                    true => (None, Some(base_runs(huge.first(), self.words.table(huge.0)))),
                };
                whole.into_iter().chain(parts.into_iter().flatten())
            })
            .filter(|(_, content)| *content != Content::Resident)
    }

    /// Clears the locks and marks of a daemon that died. Calls `held` for each
    /// frame or huge frame that was locked, with what its word says.
    ///
    /// A word that no Ebb wrote counts as resident: the page in the RAM file,
    /// or a hole's zeros, are then what the guest gets.
    pub fn recover(&mut self, mut held: impl FnMut(FrameRange, Content)) {
        for (index, word) in self.words.huge().iter().enumerate() {
            let huge = HugeFrame(index as u64);
            let value = word.load(Acquire);
            if !is_mixed(value) {
                recover_word(word, FrameRange::huge(huge), &mut held);
                continue;
            }
            word.store(MIXED, Release);
            for (base, gfn) in self.words.table(huge.0).iter().zip(huge.first().0..) {
                recover_word(base, FrameRange::new(Gfn(gfn), 1), &mut held);
            }
        }
    }

    fn huge(&self, huge: HugeFrame) -> Option<&Word> {
        self.words.huge().get(usize::try_from(huge.0).ok()?)
    }

    fn table(&self, huge: HugeFrame) -> Option<&[Word]> {
        self.huge(huge).map(|_| self.words.table(huge.0))
    }

    /// The word that speaks for this frame now.
    fn word(&self, gfn: Gfn) -> Option<&Word> {
        let word = self.huge(gfn.huge())?;
        match is_mixed(word.load(Acquire)) {
            true => self.table(gfn.huge())?.get(gfn.index_in_huge()),
            false => Some(word),
        }
    }
}

fn huge_count(end: Gfn) -> u64 {
    end.0.div_ceil(FRAMES_PER_HUGE)
}

fn recover_word(word: &Word, frames: FrameRange, held: &mut impl FnMut(FrameRange, Content)) {
    let value = word.load(Acquire);
    let content = Content::from_word(value).unwrap_or(Content::Resident);
    if value & (LOCK | WANT) != 0 || content.to_word() != value {
        word.store(content.to_word(), Release);
    }
    if value & LOCK != 0 {
        held(frames, content);
    }
}

/// Runs of equal content in a table; equal words only, so that a `Watch` or a
/// slot never speaks for its neighbour.
fn base_runs(first: Gfn, table: &[Word]) -> impl Iterator<Item = (FrameRange, Content)> {
    let content = |index: usize| {
        let word: &Word = table.get(index)?;
        Some(Content::from_word(word.load(Acquire)).unwrap_or(Content::Resident))
    };
    let mut at = 0;
    std::iter::from_fn(move || {
        let this = content(at)?;
        let start = at;
        while content(at) == Some(this) {
            at += 1;
        }
        let range = FrameRange::new(Gfn(first.0 + start as u64), (at - start) as u64);
        Some((range, this))
    })
}
