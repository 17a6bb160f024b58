//! Content that cannot be brought back: the guest waits for it, and touches it again.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_units::Gfn;

/// Time without a failure after which the last one counts as over.
pub(super) const FORGOTTEN: Duration = Duration::from_secs(2);

/// Shortest time between two different failures in the log: several may alternate, as damaged pages
/// do.
const LOG_EVERY: Duration = Duration::from_secs(30);

#[derive(Default)]
pub(crate) struct Failure(Mutex<State>);

#[derive(Default)]
pub(super) struct State {
    /// The last failure, the frame that cannot be brought back, and when that was found.
    pub(super) last: Option<(Arc<io::Error>, Gfn, Instant)>,
    /// The failure that was logged last, and when.
    logged: Option<(String, Instant)>,
}

impl Failure {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a failure. Returns its text for the log, if it differs from the one logged last and
    /// that was [`LOG_EVERY`] ago.
    pub(super) fn note(&self, gfn: Gfn, error: io::Error, now: Instant) -> Option<String> {
        let (text, mut state) = (error.to_string(), self.state());
        state.last = Some((Arc::new(error), gfn, now));
        let is_known = |(logged, at): &(String, Instant)| {
            *logged == text || now.duration_since(*at) < LOG_EVERY
        };
        if state.logged.as_ref().is_some_and(is_known) {
            return None;
        }
        state.logged = Some((text.clone(), now));
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_that_alternate_are_logged_now_and_then() {
        let (failure, start) = (Failure::default(), Instant::now());
        let logged = (0..1000).filter_map(|number: u32| {
            let error = io::Error::other(format!("page {}", number % 2));
            failure.note(Gfn(7), error, start + Duration::from_millis(100) * number)
        });
        assert_eq!(logged.collect::<Vec<_>>(), ["page 0", "page 1", "page 0", "page 1"]);
        let state = failure.state();
        let (error, gfn, _) = state.last.as_ref().unwrap();
        assert_eq!((error.to_string().as_str(), *gfn), ("page 1", Gfn(7)));
    }
}
