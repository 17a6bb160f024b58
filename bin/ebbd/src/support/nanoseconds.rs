//! Durations as the API gives them.

use std::time::Duration;

/// The duration in nanoseconds, at most `u64::MAX`.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
