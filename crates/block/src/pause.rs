//! How long a queue waits before it asks again for memory that could not be had.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// As long as an eviction holds frames, where all goes well.
const FIRST: Duration = Duration::from_millis(1);
/// Where a swap disk does not answer, asking more often helps nobody.
const LONGEST: Duration = Duration::from_millis(64);

/// A pause that grows while nothing comes of asking.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Pause {
    length: Duration,
    end: Option<Instant>,
}

impl Pause {
    /// Something could not be had. A pause that lasts already is not made longer.
    pub(crate) fn begin(&mut self) {
        if self.end.is_none() {
            self.length = (self.length * 2).clamp(FIRST, LONGEST);
            self.end = Some(Instant::now() + self.length);
        }
    }

    /// Something was had: the next pause is short again.
    pub(crate) fn shorten(&mut self) {
        self.length = Duration::ZERO;
    }

    /// Whether it has come to its end just now. Who waits asks again then, and begins another if
    /// that comes to nothing.
    pub(crate) fn is_over(&mut self) -> bool {
        let is_over = self.end.is_some_and(|end| end <= Instant::now());
        if is_over {
            self.end = None;
        }
        is_over
    }

    /// What is left of it: nothing, if it is time to ask again; `None`: nobody waits.
    pub(crate) fn rest(&self) -> Option<Duration> {
        self.end.map(|end| end.saturating_duration_since(Instant::now()))
    }
}

/// Whether `wake` is readable by the end of a pause.
pub(crate) fn wait_for(wake: &OwnedFd, pause: Duration) -> bool {
    let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(pause.min(LONGEST).subsec_nanos()) };
    // Interrupted, it has waited long enough.
    poll(&mut [PollFd::new(wake, PollFlags::IN)], Some(&pause)) == Ok(1)
}
