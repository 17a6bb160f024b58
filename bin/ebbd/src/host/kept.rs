//! What a look at the host found, kept for a while: looks take time, and anybody who may read may
//! ask.

use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// What a look found counts for this long.
const KEPT: Duration = Duration::from_secs(5);
/// While a look takes long, the last one counts for this long: a QEMU that serves its own faults
/// can make a look wait.
const KEPT_MOST: Duration = Duration::from_secs(60);

/// What was found last, and what finds it. One look is under way at a time.
pub(super) struct Kept<L, T> {
    looker: Mutex<L>,
    last: Mutex<Option<(Instant, T)>>,
}

impl<L: Default, T> Default for Kept<L, T> {
    fn default() -> Kept<L, T> {
        Kept { looker: Mutex::default(), last: Mutex::new(None) }
    }
}

impl<L, T: Clone> Kept<L, T> {
    /// What was found, and when: now, a few seconds ago, or some time ago if another one looks.
    /// None: another one looks, and nothing is known.
    pub(super) fn look(&self, look: impl FnOnce(&mut L) -> T) -> Option<(Instant, T)> {
        let mut looker = match self.looker.try_lock() {
            Ok(looker) => looker,
            // A look that panicked has lost only what it looked at then, which is found anew.
            Err(TryLockError::Poisoned(looker)) => looker.into_inner(),
            Err(TryLockError::WouldBlock) => return self.last(KEPT_MOST),
        };
        if let Some(last) = self.last(KEPT) {
            return Some(last);
        }
        let found = look(&mut looker);
        let found = (Instant::now(), found);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(found.clone());
        Some(found)
    }

    /// What was found last, unless that is so long ago.
    fn last(&self, most: Duration) -> Option<(Instant, T)> {
        // It is whole between any two statements that change it.
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.filter(|(at, _)| at.elapsed() < most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The found number is that of the look.
    fn count(kept: &Kept<u64, u64>) -> u64 {
        let look = |looks: &mut u64| {
            *looks += 1;
            *looks
        };
        kept.look(look).expect("nobody else looks").1
    }

    #[test]
    fn however_many_ask_there_is_a_look_now_and_then() {
        let (kept, began) = (Kept::default(), Instant::now());
        let looks = (0..1000).map(|_| count(&kept)).max().expect("a number");
        assert!(looks <= 1 + began.elapsed().as_secs() / KEPT.as_secs(), "{looks} looks");
    }

    #[test]
    fn what_is_old_is_looked_for_again_and_counts_meanwhile() {
        let old = Instant::now().checked_sub(KEPT).expect("the host runs for longer");
        let kept = Kept { looker: Mutex::new(()), last: Mutex::new(Some((old, 1))) };
        let meanwhile = |_: &mut ()| {
            let last = kept.look(|_| 3).expect("the last one");
            assert_eq!(last, (old, 1));
            2
        };
        let (at, found) = kept.look(meanwhile).expect("nobody else looks");
        assert!(at > old && found == 2);
    }

    #[test]
    fn nobody_waits_for_the_first_look_of_another_one() {
        let kept = Kept::<(), u32>::default();
        let meanwhile = |_: &mut ()| {
            assert_eq!(kept.look(|_| 2), None);
            1
        };
        assert_eq!(kept.look(meanwhile).map(|(_, found)| found), Some(1));
    }

    #[test]
    fn a_look_that_panics_is_no_end_of_looking() {
        let kept = Kept::<u64, u64>::default();
        let broken = std::panic::AssertUnwindSafe(|| kept.look(|_| panic!("as a test wants it")));
        assert!(std::panic::catch_unwind(broken).is_err());
        assert_eq!(count(&kept), 1);
    }
}
