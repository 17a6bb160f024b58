//! A rate limiter for moves, which take bandwidth from the guests (vTMM, section 3.4).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lets a number of bytes pass each second, for all who share it. Unused bandwidth is not saved up.
#[derive(Debug)]
pub struct RateLimiter {
    /// The limit; `u64::MAX`: none.
    bytes_per_second: u64,
    /// The time at which all that was asked for will have passed.
    busy_until: Mutex<Option<Instant>>,
}

impl RateLimiter {
    /// A limit of `bytes_per_second`; 0 counts as 1.
    pub fn new(bytes_per_second: u64) -> RateLimiter {
        RateLimiter { bytes_per_second: bytes_per_second.max(1), busy_until: Mutex::new(None) }
    }

    /// No limit.
    pub fn unlimited() -> RateLimiter {
        RateLimiter::new(u64::MAX)
    }

    /// Waits until `bytes` more may be moved.
    pub fn wait(&self, bytes: u64) {
        std::thread::sleep(self.reserve(Instant::now(), bytes));
    }

    /// Counts `bytes` as moved. Returns how long to wait from `now` on.
    fn reserve(&self, now: Instant, bytes: u64) -> Duration {
        if self.bytes_per_second == u64::MAX {
            return Duration::ZERO;
        }
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let start = busy_until.map_or(now, |until| until.max(now));
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        *busy_until = start.checked_add(takes);
        start - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_requests_wait() {
        let (limiter, now) = (RateLimiter::new(1000), Instant::now());
        let at = |ms| now + Duration::from_millis(ms);
        assert_eq!(limiter.reserve(now, 500), Duration::ZERO);
        assert_eq!(limiter.reserve(at(100), 1000), Duration::from_millis(400));
        assert_eq!(limiter.reserve(at(100), 1), Duration::from_millis(1400));
        // A pause is not saved up.
        assert_eq!(limiter.reserve(at(9000), 2000), Duration::ZERO);
        assert_eq!(limiter.reserve(at(9000), 1), Duration::from_secs(2));
    }

    #[test]
    fn without_a_limit_no_request_waits() {
        let (limiter, now) = (RateLimiter::unlimited(), Instant::now());
        assert_eq!(limiter.reserve(now, u64::MAX), Duration::ZERO);
        assert_eq!(limiter.reserve(now, u64::MAX), Duration::ZERO);
        assert_eq!(RateLimiter::new(0).reserve(now, 1), Duration::ZERO);
    }
}
