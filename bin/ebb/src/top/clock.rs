//! Moments as people read and write them, in the local time zone.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Tells the time of moments.
#[derive(Clone)]
pub struct Clock(TimeZone);

impl Clock {
    /// The clock of this host.
    pub fn local() -> Clock {
        Clock(TimeZone::system())
    }

    /// A clock in UTC.
    #[cfg(test)]
    pub fn utc() -> Clock {
        Clock(TimeZone::UTC)
    }

    /// The time of day, as `14:05:03`.
    pub fn time(&self, unix_ms: u64) -> String {
        self.text(unix_ms, "%H:%M:%S")
    }

    /// The day and the time, as `2026-11-28 14:05:03`.
    #[expect(dead_code, reason = "history")]
    pub fn day_and_time(&self, unix_ms: u64) -> String {
        self.text(unix_ms, "%Y-%m-%d %H:%M:%S")
    }

    fn text(&self, unix_ms: u64, form: &str) -> String {
        let moment =
            i64::try_from(unix_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
        moment.map_or("?".into(), |moment| {
            moment.to_zoned_datetime(self.0.clone()).strftime(form).to_string()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_has_a_time() {
        assert_eq!(Clock::utc().time(1_795_874_703_000), "14:05:03");
        assert_eq!(Clock::utc().time(u64::MAX), "?");
    }
}
