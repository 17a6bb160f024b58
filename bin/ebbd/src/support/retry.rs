//! When to try again what failed: after a pause that doubles with each failure.

use std::time::{Duration, Instant};

/// Schedule of one action that may fail.
pub struct Retry {
    due: Instant,
    pause: Duration,
    first: Duration,
    most: Duration,
}

impl Retry {
    /// Due at once. The pause is `first` after the first failure, and never longer than `most`.
    pub fn new(first: Duration, most: Duration) -> Retry {
        Retry { due: Instant::now(), pause: Duration::ZERO, first, most }
    }

    /// Whether it may be tried now.
    pub fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    /// Notes a failure.
    pub fn failed(&mut self) {
        self.pause = (self.pause * 2).clamp(self.first, self.most);
        self.due = Instant::now() + self.pause;
    }

    /// Notes a success.
    pub fn worked(&mut self) {
        (self.due, self.pause) = (Instant::now(), Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_end_with_success() {
        let mut retry = Retry::new(Duration::from_secs(100), Duration::from_secs(250));
        assert!(retry.is_due());
        let pauses = [100, 200, 250, 250].map(Duration::from_secs);
        for pause in pauses {
            retry.failed();
            assert_eq!((retry.pause, retry.is_due()), (pause, false));
        }
        retry.worked();
        assert!(retry.is_due());
        retry.failed();
        assert_eq!(retry.pause, pauses[0]);
    }
}
