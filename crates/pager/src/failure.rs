//! Content that cannot be brought back: whoever needs it waits, and asks again.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::pager::{Pager, is_gone};

/// A refill thread rests so long before the guest may ask again for what cannot be read.
const PAUSE: Duration = Duration::from_millis(100);
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

    /// A fault cannot be served. On threads that may wait the guest does, too: else it
    /// would ask without end.
    pub(crate) fn fault_failed(&self, error: io::Error, may_wait: bool) {
        if is_gone(&error) {
            return;
        }
        let text = error.to_string();
        if self.failure.note(error) {
            tracing::error!("fault: {text}");
        }
        if may_wait {
            std::thread::sleep(PAUSE);
        }
    }
}
