//! Times as people write and read them.

use std::str::FromStr;

/// A length of time in milliseconds, written `500ms`, `5s`, `2m` or `1h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interval {
    pub ms: u64,
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Interval, String> {
        parse(text)
            .ok_or_else(|| "write a whole number with ms, s, m or h behind it, as in 5s".into())
    }
}

fn parse(text: &str) -> Option<Interval> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 3600 * 1000,
        _ => return None,
    };
    Some(Interval { ms: number.parse::<u64>().ok()?.checked_mul(unit_ms)? })
}

/// Returns `ns` in the unit that leaves one to three digits before the point.
pub fn readable(ns: u64) -> String {
    let (unit, ns_per_unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => ("us", 1_000),
        1_000_000..1_000_000_000 => ("ms", 1_000_000),
        _ => ("s", 1_000_000_000),
    };
    match (ns / ns_per_unit, ns % ns_per_unit * 10 / ns_per_unit) {
        (whole, 0) => format!("{whole} {unit}"),
        (whole, tenth) => format!("{whole}.{tenth} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, ms) in [("500ms", 500), ("5s", 5000), ("2m", 120_000), ("1h", 3_600_000)] {
            assert_eq!(text.parse(), Ok(Interval { ms }), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_time() {
        for text in
            ["", "5", "s", "5 s", "-5s", "1.5s", "5d", "99999999999999999999s", "9999999999999999h"]
        {
            assert!(text.parse::<Interval>().is_err(), "{text}");
        }
    }

    #[test]
    fn prints_one_decimal() {
        let read = [999, 1_000, 7_149, 3_000_000, 1_500_000_000, 90_000_000_000].map(readable);
        assert_eq!(read, ["999 ns", "1 us", "7.1 us", "3 ms", "1.5 s", "90 s"]);
    }
}
