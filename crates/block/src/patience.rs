//! How long to poll for an event before sleeping until it comes.
//!
//! A thread that sleeps on an idle core takes tens of microseconds to wake, more than a fast
//! disk's request. So a thread that expects the event soon polls for it. It expects the wait that
//! it had lately, as KVM's halt polling does for vCPUs.

use std::thread;
use std::time::{Duration, Instant};

/// Longest poll. Longer waits hardly gain by it.
const LOOK_MOST: Duration = Duration::from_micros(200);
/// Longest wait that counts. It makes a few short waits enough to forget a long one.
const WAIT_MOST: Duration = Duration::from_micros(800);
/// Weight of the expected wait against the last one.
const WEIGHT: u32 = 3;

/// What is known of the waits for one kind of event.
pub(crate) struct Patience {
    expected: Duration,
    /// When the present wait began.
    since: Option<Instant>,
}

impl Default for Patience {
    /// Expects a long wait.
    fn default() -> Patience {
        Patience { expected: WAIT_MOST, since: None }
    }
}

impl Patience {
    /// Polls until `is_over`: the event has come, or another that cannot wait. `false`: it is time
    /// to sleep. Whoever handles the event calls [`Patience::came`].
    pub(crate) fn look(&mut self, mut is_over: impl FnMut() -> bool) -> bool {
        let began = Instant::now();
        self.since.get_or_insert(began);
        let most = self.most();
        while !most.is_zero() {
            if is_over() {
                return true;
            }
            if began.elapsed() >= most {
                break;
            }
            // The guest that is to make the event may need this processor.
            thread::yield_now();
        }
        false
    }

    /// Learns from a wait that has ended, polled or not.
    pub(crate) fn came(&mut self) {
        let Some(since) = self.since.take() else { return };
        self.learn(since.elapsed());
    }

    fn learn(&mut self, waited: Duration) {
        self.expected = (self.expected * WEIGHT + waited.min(WAIT_MOST)) / (WEIGHT + 1);
    }

    fn most(&self) -> Duration {
        match self.expected <= LOOK_MOST {
            true => (self.expected * 2).min(LOOK_MOST),
            false => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waits_make_it_look_and_long_ones_sleep() {
        let mut patience = Patience::default();
        assert_eq!(patience.most(), Duration::ZERO);
        (0..20).for_each(|_| patience.learn(Duration::from_micros(50)));
        assert!(patience.most() > Duration::from_micros(90), "{:?}", patience.most());
        (0..2).for_each(|_| patience.learn(Duration::from_secs(1)));
        assert_eq!(patience.most(), Duration::ZERO);
        (0..6).for_each(|_| patience.learn(Duration::from_micros(50)));
        assert!(patience.most() > Duration::ZERO);
    }

    #[test]
    fn a_request_that_comes_during_a_look_is_seen() {
        let mut patience = Patience { expected: Duration::from_micros(100), since: None };
        // It is seen however long the thread was off the processor.
        assert!(patience.look(|| true));
        patience.came();
        assert_eq!(patience.since, None);
        assert!(!patience.look(|| false));
        assert!(patience.since.is_some());
        assert!(!Patience::default().look(|| panic!("it expects a long wait")));
    }

    #[test]
    fn another_event_ends_a_look_and_not_the_wait() {
        let mut patience = Patience { expected: Duration::from_micros(100), since: None };
        assert!(patience.look(|| true));
        let began = patience.since;
        assert!(began.is_some());
        assert!(patience.look(|| true));
        assert_eq!(patience.since, began);
    }
}
