//! Locked words, which are unlocked when dropped, whatever happens in between.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ebb_units::{FrameRange, Gfn};

use crate::content::{Content, LOCK, WANT, is_mixed};
use crate::entry::{Word, abandon, commit, try_lock, unlock};

/// A word is locked: try another frame, or try later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Busy {
    /// Whether a fault came for one of the other words while the attempt had locked them. If so,
    /// wake their frames, so that they fault again.
    pub wanted: bool,
}

impl Busy {
    pub(crate) const UNTOUCHED: Busy = Busy { wanted: false };
}

/// Whether a word is locked. The answer holds only for the holder of its lock: others mark the word
/// meanwhile, and do nothing else to it.
fn is_locked(word: &Word) -> bool {
    word.load(Relaxed) & LOCK != 0
}

/// Whether a locked word is marked. `true` stays so until the holder unlocks it.
fn is_marked(word: &Word) -> bool {
    word.load(Relaxed) & WANT != 0
}

/// One locked frame.
#[must_use]
pub struct LockedFrame<'l> {
    word: &'l Word,
    content: Content,
    held: bool,
}

impl<'l> LockedFrame<'l> {
    pub(crate) fn new(word: &'l Word, before: u64) -> LockedFrame<'l> {
        let content = Content::from_word(before).unwrap_or(Content::Resident);
        LockedFrame { word, content, held: true }
    }

    /// Returns where its content is.
    pub fn content(&self) -> Content {
        self.content
    }

    /// Records what the frame is about to become, and keeps it locked. `false`: a fault wants it
    /// as it was, and nothing is recorded.
    #[must_use]
    pub fn commit(&mut self, next: Content) -> bool {
        debug_assert!(is_locked(self.word), "{next:?} is committed without the lock");
        let done = commit(self.word, next.to_word());
        debug_assert!(done || is_marked(self.word), "only a mark makes a commit fail");
        if done {
            self.content = next;
        }
        done
    }

    /// Makes the frame `next` and unlocks it. Whether a fault for it must be served.
    #[must_use]
    pub fn unlock(mut self, next: Content) -> bool {
        unlock(self.end(), next.to_word())
    }

    /// Unlocks the frame without a change. Whether a fault for it must be served.
    #[must_use]
    pub fn abandon(mut self) -> bool {
        abandon(self.end())
    }

    /// Returns the word, which the caller unlocks.
    fn end(&mut self) -> &'l Word {
        self.held = false;
        debug_assert!(is_locked(self.word), "{:?} is unlocked twice", self.content);
        self.word
    }
}

impl Drop for LockedFrame<'_> {
    fn drop(&mut self) {
        if self.held {
            // Only a panic comes here: every other way unlocks explicitly.
            abandon(self.end());
        }
    }
}

fn abandon_all(words: &[Word]) -> bool {
    words.iter().fold(false, |wanted, word| abandon(word) | wanted)
}

/// The locked frames of a range in one huge frame: one word for all, or one each.
#[must_use]
pub struct Locked<'l> {
    words: &'l [Word],
    frames: FrameRange,
    held: bool,
}

impl<'l> Locked<'l> {
    pub(crate) fn take(words: &'l [Word], frames: FrameRange) -> Result<Locked<'l>, Busy> {
        for (index, word) in words.iter().enumerate() {
            match try_lock(word) {
                // Split since the caller looked: the word counts for no frame now.
                Some(before) if is_mixed(before) => {
                    return Err(Busy { wanted: abandon_all(&words[..=index]) });
                }
                Some(_) => {}
                None => return Err(Busy { wanted: abandon_all(&words[..index]) }),
            }
        }
        Ok(Locked { words, frames, held: true })
    }

    /// Returns the locked frames.
    pub fn frames(&self) -> FrameRange {
        self.frames
    }

    /// Returns where their content is, for each word.
    pub fn contents(&self) -> impl Iterator<Item = (FrameRange, Content)> {
        let each = self.frames.count / (self.words.len() as u64).max(1);
        self.words.iter().zip(0..).map(move |(word, index): (&Word, u64)| {
            let value = word.load(Acquire);
            let frames = FrameRange::new(Gfn(self.frames.start.0 + index * each), each);
            (frames, Content::from_word(value).unwrap_or(Content::Resident))
        })
    }

    /// Unlocks all but the first `count` frames, which have a word each. Whether a fault for one of
    /// the unlocked frames must be served.
    pub fn keep(mut self, count: u64) -> (Locked<'l>, bool) {
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(self.words.len());
        debug_assert_eq!(self.words.len() as u64, self.frames.count, "each frame has a word");
        let (kept, rest) = self.end().split_at(count);
        let frames = FrameRange::new(self.frames.start, count as u64);
        (Locked { words: kept, frames, held: true }, abandon_all(rest))
    }

    /// Records what all frames are about to become, and keeps them locked. Marks stay:
    /// [`Locked::unlock`] reports them.
    pub fn set(&self, next: Content) {
        for word in self.words {
            debug_assert!(is_locked(word), "{next:?} is set without the lock");
            // The word is marked: keep the mark. It cannot change in between, since others only
            // mark a locked word.
            if !commit(word, next.to_word()) {
                debug_assert!(is_marked(word), "only a mark makes a commit fail");
                word.store(next.to_word() | LOCK | WANT, Release);
            }
        }
    }

    /// Unlocks the frames without a change. Whether a fault for one must be served.
    #[must_use]
    pub fn abandon(mut self) -> bool {
        abandon_all(self.end())
    }

    /// Makes all the frames `next` and unlocks them. Whether a fault for one must be served.
    #[must_use]
    pub fn unlock(mut self, next: Content) -> bool {
        self.end().iter().fold(false, |wanted, word| unlock(word, next.to_word()) | wanted)
    }

    /// Replaces the content of each word by what `next` makes of it, and unlocks it. Whether a
    /// fault for one must be served.
    #[must_use]
    pub fn unlock_with(mut self, next: impl Fn(Content) -> Content) -> bool {
        self.end().iter().fold(false, |wanted, word| {
            let content = Content::from_word(word.load(Acquire)).unwrap_or(Content::Resident);
            unlock(word, next(content).to_word()) | wanted
        })
    }

    /// Replaces the content of each word by the one at its place in `next`, and unlocks it. A word
    /// without one there keeps its content. Whether a fault for one must be served.
    #[must_use]
    pub fn unlock_each(mut self, next: &[Content]) -> bool {
        let count = next.len().min(self.words.len());
        let (words, rest) = self.end().split_at(count);
        let each = words.iter().zip(next);
        let wanted = each.fold(false, |wanted, (word, next)| unlock(word, next.to_word()) | wanted);
        abandon_all(rest) | wanted
    }

    /// Returns the words, which the caller unlocks.
    fn end(&mut self) -> &'l [Word] {
        self.held = false;
        debug_assert!(self.words.iter().all(is_locked), "{:?} is unlocked twice", self.frames);
        self.words
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.held {
            abandon_all(self.end());
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use crate::content::MIXED;
    use ebb_units::HugeFrame;
    use loom::sync::Arc;
    use loom::thread;

    /// One thread splits a huge frame while another locks it as a whole. Whoever is first: once
    /// split it stays split, and is not locked.
    #[test]
    fn a_split_is_never_undone() {
        loom::model(|| {
            let words = Arc::new([Word::new(0)]);
            let splitter = {
                let words = words.clone();
                thread::spawn(move || {
                    try_lock(&words[0]).is_some_and(|_| {
                        let _ = unlock(&words[0], MIXED);
                        true
                    })
                })
            };
            let taker = {
                let words = words.clone();
                thread::spawn(move || {
                    if let Ok(held) = Locked::take(&*words, FrameRange::huge(HugeFrame(0))) {
                        let _ = held.unlock(Content::Resident);
                    }
                })
            };
            taker.join().unwrap();
            let split = splitter.join().unwrap();
            assert_eq!(words[0].load(Acquire), if split { MIXED } else { 0 });
        });
    }
}
