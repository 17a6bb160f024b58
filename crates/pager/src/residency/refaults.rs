//! How soon evicted frames come back: a limit is too low for a guest whose frames come back within
//! seconds.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_units::Gfn;

use crate::support::sparse::Sparse;

/// A frame that is touched within this time after its eviction was in use then.
const SOON: Duration = Duration::from_secs(30);

/// How a touched frame comes back.
#[derive(Clone, Copy)]
pub(crate) struct Comeback {
    /// It was evicted seconds before.
    pub(crate) is_soon: bool,
    /// It was evicted seconds before, or something else has to go for it.
    pub(crate) is_missed: bool,
}

/// When each frame was evicted last.
pub(crate) struct Refaults {
    began: Instant,
    /// Seconds since then, plus one. 0: never, or it has come back.
    evicted: Sparse,
}

impl Refaults {
    pub(crate) fn new(frames: u64) -> Refaults {
        Refaults { began: Instant::now(), evicted: Sparse::new(frames) }
    }

    fn now(&self) -> u32 {
        u32::try_from(self.began.elapsed().as_secs()).unwrap_or(u32::MAX).saturating_add(1)
    }

    /// Notes that the frame is evicted.
    pub(crate) fn went(&self, gfn: Gfn) {
        if let Some(evicted) = self.evicted.make(gfn.0) {
            evicted.store(self.now(), Relaxed);
        }
    }

    /// Notes that the frame was touched and comes back. Returns whether that is soon after its
    /// eviction.
    pub(crate) fn came(&self, gfn: Gfn) -> bool {
        let evicted = self.evicted.get(gfn.0).map_or(0, |evicted| evicted.swap(0, Relaxed));
        let seconds = u64::from(self.now().saturating_sub(evicted));
        evicted > 0 && seconds < SOON.as_secs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_comes_back_soon_is_told_from_others() {
        let long_ago = Instant::now().checked_sub(2 * SOON).unwrap();
        let refaults = Refaults { began: long_ago, ..Refaults::new(3000) };
        refaults.went(Gfn(2000));
        assert!(refaults.came(Gfn(2000)));
        assert!(!refaults.came(Gfn(2000)), "it has come back");
        assert!(!refaults.came(Gfn(1)), "it was never evicted");
        assert!(!refaults.came(Gfn(9999)), "there is no such frame");
        let evicted = refaults.evicted.make(7).unwrap();
        evicted.store(1, Relaxed);
        assert!(!refaults.came(Gfn(7)), "long ago");
    }
}
