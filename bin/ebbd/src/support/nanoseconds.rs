//! Durations as the interface tells them.

use std::time::Duration;

/// In nanoseconds, as far as a number holds them.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
