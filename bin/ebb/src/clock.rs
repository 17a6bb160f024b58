//! Moments as people read and write them, in the local time zone.

use jiff::Timestamp;
use jiff::civil::{DateTime, Time};
use jiff::tz::TimeZone;

/// Reads a moment as an argument: see [`Clock::moment`].
///
/// # Errors
/// The text is no moment.
pub fn moment(text: &str) -> Result<u64, String> {
    Clock::local().moment(text, Timestamp::now())
}

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
    pub fn day_and_time(&self, unix_ms: u64) -> String {
        self.text(unix_ms, "%Y-%m-%d %H:%M:%S")
    }

    /// Reads a moment, as `14:05`, `14:05:30` or `2026-11-28T14:05`. A time without a day is the last
    /// one before `now`. Returns seconds since 1970 (UTC).
    ///
    /// # Errors
    /// The text is no moment.
    pub fn moment(&self, text: &str, now: Timestamp) -> Result<u64, String> {
        let moment = match text.parse::<Time>() {
            Ok(time) if !text.contains('T') => self.last(time, now),
            _ => text.parse::<DateTime>().ok().and_then(|day| self.0.to_timestamp(day).ok()),
        };
        let second = moment.and_then(|moment| u64::try_from(moment.as_second()).ok());
        second.ok_or_else(|| "write it as 14:05, 14:05:30 or 2026-11-28T14:05".into())
    }

    /// The last moment before `now` with this time of day.
    fn last(&self, time: Time, now: Timestamp) -> Option<Timestamp> {
        let today = now.to_zoned_datetime(self.0.clone()).date();
        let at = |day: jiff::civil::Date| self.0.to_timestamp(day.to_datetime(time)).ok();
        at(today).filter(|moment| *moment <= now).or_else(|| at(today.yesterday().ok()?))
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
        assert_eq!(Clock::utc().day_and_time(0), "1970-01-01 00:00:00");
    }

    #[test]
    fn a_time_is_the_last_one() {
        let now = Timestamp::from_second(1_795_874_703).unwrap();
        let berlin = Clock(TimeZone::fixed(jiff::tz::offset(1)));
        let second = |clock: &Clock, text| clock.moment(text, now).ok();
        for (text, before) in [
            ("14:05", Some(3)),
            ("14:05:03", Some(0)),
            ("14:06", Some(86_400 - 57)),
            ("2026-11-28T14:05", Some(3)),
            ("2026-11-28 14:05:01", Some(2)),
            ("1969-01-01T00:00", None),
            ("soon", None),
            ("", None),
            ("25:00", None),
            ("14h05", None),
        ] {
            let wanted = before.map(|before| 1_795_874_703 - before);
            assert_eq!(second(&Clock::utc(), text), wanted, "{text}");
        }
        assert_eq!(second(&berlin, "15:05"), Some(1_795_874_700));
        let refused = Clock::utc().moment("soon", now).unwrap_err();
        assert!(refused.contains("14:05") && !refused.contains('\n'), "{refused}");
    }
}
