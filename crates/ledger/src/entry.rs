//! The lock protocol of one ledger word. The model checker checks this file alone.
//!
//! A holder takes the lock, writes what the frame is about to become ([`commit`]), acts, and
//! unlocks. The fault thread never waits for the lock. It sets the want bit, which makes a later
//! commit fail. The unlock returns the bit to the holder, who then serves the fault in the fault
//! thread's place.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU64 as Word;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::AtomicU64 as Word;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use crate::content::{Content, LOCK, WANT, is_mixed};

/// What the fault thread finds when it asks for a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Want {
    /// The frame is not locked. Nothing was marked.
    Free(Content),
    /// The frame is locked, and marked now: the holder serves the fault at its unlock, or gives up
    /// at its commit. The content is what the word says so far.
    Marked(Content),
}

/// Takes the lock and returns the word from before. `None`: it is locked.
pub(crate) fn try_lock(word: &Word) -> Option<u64> {
    let seen = word.load(Acquire);
    if seen & LOCK != 0 {
        return None;
    }
    word.compare_exchange(seen, seen | LOCK, AcqRel, Acquire).ok()
}

/// Makes a locked frame `next`. `false`: the word is marked, and stays as it is.
pub(crate) fn commit(word: &Word, next: u64) -> bool {
    let seen = word.load(Acquire);
    seen & WANT == 0 && word.compare_exchange(seen, next | LOCK, AcqRel, Acquire).is_ok()
}

/// Makes a locked frame `next` and unlocks it. Whether it was marked.
pub(crate) fn unlock(word: &Word, next: u64) -> bool {
    word.swap(next, AcqRel) & WANT != 0
}

/// Unlocks a frame without a change. Whether it was marked.
pub(crate) fn abandon(word: &Word) -> bool {
    word.fetch_and(!(LOCK | WANT), Release) & WANT != 0
}

/// Asks for a frame, as [`Want`] says. `None`: the word became mixed, or Ebb never wrote it. The
/// caller looks again.
pub(crate) fn want(word: &Word) -> Option<Want> {
    let mut seen = word.load(Acquire);
    loop {
        let locked = seen & LOCK != 0;
        if !locked {
            return Content::from_word(seen).map(Want::Free);
        }
        match word.compare_exchange(seen, seen | WANT, AcqRel, Acquire) {
            // A locked mixed word is in the middle of a split.
            Ok(_) if is_mixed(seen) => return None,
            Ok(_) => return Content::from_word(seen).map(Want::Marked),
            // This ends: only the holder changes a locked word, in a few steps (lock, commit,
            // unlock).
            Err(now) => seen = now,
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    // Every side has a thread of its own: the checker tries fewer orders for the model's main
    // thread.

    const EMPTY: Content = Content::Empty { fill: 0, hard: false };
    const RESIDENT: Content = Content::Resident;

    /// One frame, one reclaimer that protects, commits and punches, and one fault thread with a
    /// write fault. In every order the writer goes on, and a frame whose writer went on before
    /// the commit is never punched.
    #[test]
    fn a_write_fault_is_served_by_exactly_one_side() {
        loom::model(|| {
            let word = Arc::new(Word::new(0));
            let punched = Arc::new(AtomicBool::new(false));
            let reclaimer = {
                let (word, punched) = (word.clone(), punched.clone());
                thread::spawn(move || {
                    try_lock(&word)?;
                    if !commit(&word, EMPTY.to_word()) {
                        return Some(abandon(&word));
                    }
                    punched.store(true, Release);
                    Some(unlock(&word, EMPTY.to_word()))
                })
            };
            let faulting = {
                let word = word.clone();
                thread::spawn(move || want(&word).expect("never mixed here"))
            };
            let holder_serves = reclaimer.join().unwrap();
            let asked = faulting.join().unwrap();
            match asked {
                // Not locked at that moment: the fault thread itself serves the fault.
                Want::Free(_) => assert_ne!(holder_serves, Some(true)),
                // Marked: the holder must have learned of the fault.
                Want::Marked(content) => {
                    assert_eq!(holder_serves, Some(true));
                    // Marked before the commit: never punched after that.
                    assert!(content != Content::Resident || !punched.load(Acquire));
                }
            }
            assert_eq!(word.load(Acquire) & (LOCK | WANT), 0);
        });
    }

    #[test]
    fn two_holders_never_meet() {
        loom::model(|| {
            let word = Arc::new(Word::new(0));
            let inside = Arc::new(AtomicBool::new(false));
            let enter = |word: Arc<Word>, inside: Arc<AtomicBool>| {
                move || {
                    if try_lock(&word).is_some() {
                        assert!(!inside.swap(true, AcqRel));
                        inside.store(false, Release);
                        abandon(&word);
                    }
                }
            };
            let first = thread::spawn(enter(word.clone(), inside.clone()));
            let second = thread::spawn(enter(word, inside));
            first.join().unwrap();
            second.join().unwrap();
        });
    }
}
