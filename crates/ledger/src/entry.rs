//! The lock protocol of one ledger word, and nothing else: this is what the
//! model checker sees.
//!
//! A holder takes the lock, writes down what the frame is about to become
//! ([`commit`]), acts, and unlocks. The fault thread never waits for it: it
//! sets the want bit, which makes a commit still to come fail, and which an
//! unlock hands to the holder, who then serves the fault in its place.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU64 as Word;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::AtomicU64 as Word;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use crate::content::{Content, LOCK, WANT, is_mixed};

/// What the fault thread found when it asked for a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Want {
    /// Nobody holds it; nothing was marked.
    Free(Content),
    /// Held, and marked now: the holder will serve the fault at its unlock, or
    /// give up at its commit. What the word says so far.
    Marked(Content),
}

/// Takes the lock; what the word said, or `None` when somebody holds it.
pub(crate) fn try_lock(word: &Word) -> Option<u64> {
    let seen = word.load(Acquire);
    if seen & LOCK != 0 {
        return None;
    }
    word.compare_exchange(seen, seen | LOCK, AcqRel, Acquire).ok()
}

/// As the holder: the frame becomes `next`, unless somebody wants it as it is.
pub(crate) fn commit(word: &Word, next: u64) -> bool {
    let seen = word.load(Acquire);
    seen & WANT == 0 && word.compare_exchange(seen, next | LOCK, AcqRel, Acquire).is_ok()
}

/// As the holder: the frame is `next`, unlocked; whether somebody wants it.
pub(crate) fn unlock(word: &Word, next: u64) -> bool {
    word.swap(next, AcqRel) & WANT != 0
}

/// As the holder: changes nothing but the lock; whether somebody wants it.
pub(crate) fn abandon(word: &Word) -> bool {
    word.fetch_and(!(LOCK | WANT), Release) & WANT != 0
}

/// As the fault thread: see [`Want`]. `None`: the word changed to mixed, or is
/// none of ours; look again.
pub(crate) fn want(word: &Word) -> Option<Want> {
    let mut seen = word.load(Acquire);
    loop {
        let locked = seen & LOCK != 0;
        if !locked {
            return Content::from_word(seen).map(Want::Free);
        }
        match word.compare_exchange(seen, seen | WANT, AcqRel, Acquire) {
            // A locked mixed word is one that is just being split.
            Ok(_) if is_mixed(seen) => return None,
            Ok(_) => return Content::from_word(seen).map(Want::Marked),
            // Only the holder's own few steps change a locked word, so this
            // ends: lock, commit, unlock.
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

    // Every side is a thread of its own: the checker tries fewer orders for
    // what the model's main thread does.

    const EMPTY: Content = Content::Empty { fill: 0, hard: false };
    const RESIDENT: Content = Content::Resident;

    /// One frame, one reclaimer that protects, commits and punches, one fault
    /// thread with a write fault. Whatever the order: the writer goes on, and
    /// a frame that was let go before the commit is never punched.
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
                // Not held at that moment: the fault thread itself serves it.
                Want::Free(_) => assert_ne!(holder_serves, Some(true)),
                // Marked: the holder must have been told.
                Want::Marked(content) => {
                    assert_eq!(holder_serves, Some(true));
                    // Let go before the commit: never punched after that.
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
