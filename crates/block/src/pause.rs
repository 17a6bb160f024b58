//! How long a queue waits before it asks again for memory that could not be had.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// First pause: as long as an eviction keeps frames locked if all goes well.
const FIRST: Duration = Duration::from_millis(1);
/// Longest pause. To ask more often does not help when a swap disk does not answer.
const LONGEST: Duration = Duration::from_millis(64);

/// A pause that grows with each try that fails.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Pause {
    length: Duration,
    end: Option<Instant>,
}

impl Pause {
    /// Begins a pause after a failed try. It does not extend one that still runs.
    pub(crate) fn begin(&mut self) {
        if self.end.is_none() {
            self.length = (self.length * 2).clamp(FIRST, LONGEST);
            self.end = Some(Instant::now() + self.length);
        }
    }

    /// Makes the next pause short again, after a try that succeeded.
    pub(crate) fn shorten(&mut self) {
        self.length = Duration::ZERO;
    }

    /// Whether it has just ended. The caller then tries again, and begins another pause if that
    /// fails.
    pub(crate) fn is_over(&mut self) -> bool {
        let is_over = self.end.is_some_and(|end| end <= Instant::now());
        if is_over {
            self.end = None;
        }
        is_over
    }

    /// Returns what is left of it, zero if it is time to try again. `None`: there is no pause.
    pub(crate) fn rest(&self) -> Option<Duration> {
        self.end.map(|end| end.saturating_duration_since(Instant::now()))
    }
}

/// Waits until `wake` is readable or the pause ends. Whether `wake` is readable.
pub(crate) fn wait_for(wake: &OwnedFd, pause: Duration) -> bool {
    let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(pause.min(LONGEST).subsec_nanos()) };
    // If interrupted, it has waited long enough.
    poll(&mut [PollFd::new(wake, PollFlags::IN)], Some(&pause)) == Ok(1)
}
