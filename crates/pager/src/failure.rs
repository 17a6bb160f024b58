//! Content that cannot be brought back: whoever needs it waits, and asks again.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_units::Gfn;

use crate::pager::{Pager, is_gone};

/// A failure that nobody met for so long is over.
const FORGOTTEN: Duration = Duration::from_secs(2);

/// The last one, and when.
#[derive(Default)]
pub(crate) struct Failure(Mutex<Option<(Arc<io::Error>, Instant)>>);

impl Failure {
    /// Notes it; whether it is another one than before.
    fn note(&self, error: io::Error) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = last.replace((Arc::new(error), Instant::now()));
        let text = |failure: &Option<(Arc<io::Error>, Instant)>| {
            failure.as_ref().map(|(error, _)| error.to_string())
        };
        text(&before) != text(&last)
    }
}

impl Pager {
    /// Why frames that the guest needs cannot be brought back; `None`: they can, or
    /// nobody asked of late.
    pub fn failure(&self) -> Option<Arc<io::Error>> {
        let last = self.failure.0.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = last.as_ref().filter(|(_, at)| at.elapsed() < FORGOTTEN);
        recent.map(|(error, _)| Arc::clone(error))
    }

    /// The fault of a frame cannot be served. One that a refill thread has read waits for a while,
    /// as the guest would ask without end; that thread goes on. `false`: the frame is to be woken now.
    pub(crate) fn fault_failed(&self, gfn: Gfn, error: io::Error, may_wait: bool) -> bool {
        if is_gone(&error) {
            return false;
        }
        let text = error.to_string();
        if self.failure.note(error) {
            tracing::error!("fault: {text}");
        }
        may_wait && self.ask_again_later(gfn)
    }
}
