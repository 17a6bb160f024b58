//! The words of all frames of a VM, looked up by frame number.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, HugeFrame};

use crate::content::{Content, LOCK, MIXED, WANT, is_mixed};
use crate::entry::{Want, Word, try_lock, unlock, want};
use crate::file::{LedgerError, Tables, Words};
use crate::locked::{Busy, Locked, LockedFrame};

/// Why the frames of a huge frame have no words of their own.
#[derive(Debug, thiserror::Error)]
pub enum SplitError {
    /// The huge frame is locked.
    #[error("the huge frame is locked")]
    Busy,
    /// The ledger's file system has no room for their words.
    #[error("the ledger: {0}")]
    NoRoom(#[source] io::Error),
}

/// The ledger of one VM, for guest-physical memory from 0 up.
pub struct Ledger {
    words: Words,
}

impl Ledger {
    /// Makes a new ledger file for frames below `end`, which are all resident.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn create(path: &Path, end: Gfn, tables: Tables) -> Result<Ledger, LedgerError> {
        Ok(Ledger { words: Words::create(path, huge_count(end), tables)? })
    }

    /// Opens the ledger that an earlier daemon left. The locks and marks of that daemon's threads
    /// are still in it: see [`Ledger::recover`].
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn open(path: &Path, end: Gfn) -> Result<Ledger, LedgerError> {
        Ok(Ledger { words: Words::open(path, huge_count(end))? })
    }

    /// Returns where the frame's content is. A frame beyond the end is resident.
    pub fn content(&self, gfn: Gfn) -> Content {
        let word = self.word(gfn).map_or(0, |word| word.load(Acquire));
        // A word that Ebb never wrote reads as resident (see `recover`): then nothing is taken from
        // the guest, and nothing is put in its place.
        Content::from_word(word).unwrap_or(Content::Resident)
    }

    /// Returns where the frame's content is, unless it is locked.
    pub fn unlocked(&self, gfn: Gfn) -> Option<Content> {
        let Some(word) = self.word(gfn) else { return Some(Content::Resident) };
        let word = word.load(Acquire);
        match word & LOCK {
            // A word without a content was split just now.
            0 => Content::from_word(word),
            _ => None,
        }
    }

    /// Returns where the frame's content is, and marks the frame if it is locked. For the fault
    /// thread.
    pub fn want(&self, gfn: Gfn) -> Want {
        loop {
            match self.word(gfn).map(want) {
                None => return Want::Free(Content::Resident),
                Some(Some(answer)) => return answer,
                Some(None) if self.is_split(gfn.huge()) => {}
                // Only a split leaves a word without a content, and a split takes 512 stores.
                Some(None) => std::hint::spin_loop(),
            }
        }
    }

    /// Locks all frames of a range in one huge frame. If it is a part of the huge frame, that must
    /// be split.
    ///
    /// # Errors
    /// [`Busy`]: a part of it is locked, or the huge frame is not split. Nothing is locked then.
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

    /// Gives each frame of a huge frame its own word, which it keeps. `true`: a fault for one of
    /// them came meanwhile. The caller must wake its thread, so that it faults again.
    ///
    /// # Errors
    /// [`SplitError`]: the huge frame keeps its one word.
    pub fn split(&self, huge: HugeFrame) -> Result<bool, SplitError> {
        let word = self.huge(huge).ok_or(SplitError::Busy)?;
        if is_mixed(word.load(Acquire)) {
            return Ok(false);
        }
        // Reserve before the lock: what is reserved is no word yet, and nobody waits meanwhile.
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

    /// Returns every run of frames with one content, without resident ones, in order. Runs end at
    /// huge-frame borders. It is a snapshot only if nobody changes the ledger meanwhile.
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

    /// Clears the locks and marks that a dead daemon left. Calls `each` for each frame or huge
    /// frame that was locked, with the content in its word.
    ///
    /// A word that Ebb never wrote counts as resident: the guest then gets the page in the RAM
    /// file, or a hole's zeros.
    pub fn recover(&mut self, mut each: impl FnMut(FrameRange, Content)) {
        for (index, word) in self.words.huge().iter().enumerate() {
            let huge = HugeFrame(index as u64);
            let value = word.load(Acquire);
            if !is_mixed(value) {
                recover_word(word, FrameRange::huge(huge), &mut each);
                continue;
            }
            word.store(MIXED, Release);
            for (base, gfn) in self.words.table(huge.0).iter().zip(huge.first().0..) {
                recover_word(base, FrameRange::new(Gfn(gfn), 1), &mut each);
            }
        }
    }

    fn huge(&self, huge: HugeFrame) -> Option<&Word> {
        self.words.huge().get(usize::try_from(huge.0).ok()?)
    }

    fn table(&self, huge: HugeFrame) -> Option<&[Word]> {
        self.huge(huge).map(|_| self.words.table(huge.0))
    }

    /// Returns the word that counts for this frame now.
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

fn recover_word(word: &Word, frames: FrameRange, each: &mut impl FnMut(FrameRange, Content)) {
    let value = word.load(Acquire);
    let content = Content::from_word(value).unwrap_or(Content::Resident);
    if value & (LOCK | WANT) != 0 || content.to_word() != value {
        word.store(content.to_word(), Release);
    }
    if value & LOCK != 0 {
        each(frames, content);
    }
}

/// Returns runs of frames with equal words in a table. So a `Watch` or a slot never counts for a
/// neighbour.
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
