//! Held words: released when dropped, whatever happens in between.

use std::sync::atomic::Ordering::{Acquire, Release};

use ebb_units::{FrameRange, Gfn};

use crate::content::{Content, LOCK, WANT, is_mixed};
use crate::entry::{Word, abandon, commit, try_lock, unlock};

/// Somebody holds a word; try another frame, or later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Busy {
    /// While the attempt held others of the words, a fault for one came: wake
    /// its frames, so that it is asked again.
    pub wanted: bool,
}

impl Busy {
    pub(crate) const UNTOUCHED: Busy = Busy { wanted: false };
}

/// One frame held.
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

    /// Where its content is.
    pub fn content(&self) -> Content {
        self.content
    }

    /// Writes down what the frame is about to become; still held. `false`:
    /// the guest wants it as it was, and nothing is written.
    #[must_use]
    pub fn commit(&mut self, next: Content) -> bool {
        let done = commit(self.word, next.to_word());
        if done {
            self.content = next;
        }
        done
    }

    /// The frame is `next` now; whether a fault for it must be served.
    #[must_use]
    pub fn unlock(mut self, next: Content) -> bool {
        self.held = false;
        unlock(self.word, next.to_word())
    }

    /// The frame stays what it is; whether a fault for it must be served.
    #[must_use]
    pub fn abandon(mut self) -> bool {
        self.held = false;
        abandon(self.word)
    }
}

impl Drop for LockedFrame<'_> {
    fn drop(&mut self) {
        if self.held {
            // Only while a panic unwinds: every other way unlocks by name.
            abandon(self.word);
        }
    }
}

fn abandon_all(words: &[Word]) -> bool {
    words.iter().fold(false, |wanted, word| abandon(word) | wanted)
}

/// The frames of a range in one huge frame, held: by one word, or one each.
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
                // Split since the caller looked: it speaks for no frame now.
                Some(before) if is_mixed(before) => {
                    return Err(Busy { wanted: abandon_all(&words[..=index]) });
                }
                Some(_) => {}
                None => return Err(Busy { wanted: abandon_all(&words[..index]) }),
            }
        }
        Ok(Locked { words, frames, held: true })
    }

    /// The frames.
    pub fn frames(&self) -> FrameRange {
        self.frames
    }

    /// Where their content is, word by word.
    pub fn contents(&self) -> impl Iterator<Item = (FrameRange, Content)> {
        let each = self.frames.count / (self.words.len() as u64).max(1);
        self.words.iter().zip(0..).map(move |(word, index): (&Word, u64)| {
            let value = word.load(Acquire);
            let frames = FrameRange::new(Gfn(self.frames.start.0 + index * each), each);
            (frames, Content::from_word(value).unwrap_or(Content::Resident))
        })
    }

    /// Lets go of all but the first `count` frames, which have a word each; whether a
    /// fault for one of those let go must be served.
    pub fn keep(mut self, count: u64) -> (Locked<'l>, bool) {
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(self.words.len());
        let (kept, rest) = self.words.split_at(count);
        self.held = false;
        let frames = FrameRange::new(self.frames.start, count as u64);
        (Locked { words: kept, frames, held: true }, abandon_all(rest))
    }

    /// Writes down what all the frames are about to become; still held. A
    /// mark stays: it is for [`Locked::unlock`] to tell.
    pub fn set(&self, next: Content) {
        for word in self.words {
            // Marked before: keep the mark. But for marking it nobody else
            // writes a held word, so it cannot change in between.
            if !commit(word, next.to_word()) {
                word.store(next.to_word() | LOCK | WANT, Release);
            }
        }
    }

    /// The frames stay what they are; whether a fault for one must be served.
    #[must_use]
    pub fn abandon(mut self) -> bool {
        self.held = false;
        abandon_all(self.words)
    }

    /// All the frames are `next` now; whether a fault for one must be served.
    #[must_use]
    pub fn unlock(mut self, next: Content) -> bool {
        self.held = false;
        self.words.iter().fold(false, |wanted, word| unlock(word, next.to_word()) | wanted)
    }

    /// Each of the words is what `next` makes of it from now on; whether a fault for one must be
    /// served.
    #[must_use]
    pub fn unlock_with(mut self, next: impl Fn(Content) -> Content) -> bool {
        self.held = false;
        self.words.iter().fold(false, |wanted, word| {
            let content = Content::from_word(word.load(Acquire)).unwrap_or(Content::Resident);
            unlock(word, next(content).to_word()) | wanted
        })
    }

    /// Each of the words is what stands in its place from now on; whether a fault for one
    /// must be served. A word for which there is nothing stays what it is.
    #[must_use]
    pub fn unlock_each(mut self, next: &[Content]) -> bool {
        self.held = false;
        let count = next.len().min(self.words.len());
        let (words, rest) = self.words.split_at(count);
        let each = words.iter().zip(next);
        let wanted = each.fold(false, |wanted, (word, next)| unlock(word, next.to_word()) | wanted);
        abandon_all(rest) | wanted
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.held {
            abandon_all(self.words);
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

    /// One thread splits a huge frame while another takes it whole. Whoever is
    /// first: once split it stays split, and nobody holds it.
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
