//! Buffers for frames under eviction, kept from one call to the next.
//!
//! Making them anew costs a page fault for each page: a third of the time that it takes to read the
//! frames.

use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_store::PageBuffer;

/// Time without use after which buffers give their memory back.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// Pages of frames under eviction, and those of them that are saved.
#[derive(Default)]
pub(crate) struct Buffers {
    pub(crate) held: PageBuffer,
    pub(crate) saved: PageBuffer,
}

/// The buffers, while no call uses them.
#[derive(Default)]
pub(crate) struct Spare(Mutex<Option<(Buffers, Instant)>>);

impl Spare {
    /// Returns buffers for a call; they are empty if no spare ones exist.
    pub(crate) fn take(&self) -> Buffers {
        self.kept().take().map(|(buffers, _)| buffers).unwrap_or_default()
    }

    /// Takes the buffers of a call that has ended.
    pub(crate) fn put(&self, buffers: Buffers) {
        *self.kept() = Some((buffers, Instant::now()));
    }

    /// Frees buffers that were not used for [`IDLE_AFTER`].
    pub(crate) fn free_idle(&self) {
        let old = self.kept().take_if(|(_, used)| used.elapsed() >= IDLE_AFTER);
        mem::drop(old);
    }

    fn kept(&self) -> MutexGuard<'_, Option<(Buffers, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_until_nobody_uses_them() {
        let spare = Spare::default();
        let mut buffers = spare.take();
        buffers.held.at_least(3)[2].fill(7);
        spare.put(buffers);
        spare.free_idle();
        let buffers = spare.take();
        assert_eq!(buffers.held.pages().len(), 3);
        assert!(spare.take().held.pages().is_empty(), "of another call");
        *spare.kept() = Instant::now().checked_sub(IDLE_AFTER).map(|used| (buffers, used));
        spare.free_idle();
        assert!(spare.take().held.pages().is_empty());
    }
}
