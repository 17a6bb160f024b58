//! Byte counts as people write and read them.

use alloc::string::String;
use core::fmt;
use core::str::FromStr;

/// A number of bytes. Parses `2G`, `512M`, `64k`, `4096`, `1.5GiB`; prints `1.5 GiB`, and with `{:#}`
/// the exact number, as `1536 MiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Bytes(pub u64);

/// The text is not a size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseBytesError(String);

impl fmt::Display for ParseBytesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no size: write a number with K, M, G or T behind it, as in 512M", self.0)
    }
}

impl core::error::Error for ParseBytesError {}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Bytes, ParseBytesError> {
        parse(text.trim()).ok_or_else(|| ParseBytesError(text.into()))
    }
}

fn parse(text: &str) -> Option<Bytes> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().trim_end_matches("iB").trim_end_matches(['B', 'b']) {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole: u64 = whole.parse().ok()?;
    let mut bytes = whole.checked_mul(1 << shift)?;
    if !fraction.is_empty() {
        let places = u32::try_from(fraction.len()).ok().filter(|&n| n <= 6)?;
        let parts: u64 = fraction.parse().ok()?;
        bytes = bytes.checked_add((parts << shift) / 10u64.pow(places))?;
    }
    Some(Bytes(bytes))
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |shift: u32| match f.alternate() {
            true => self.0 != 0 && self.0.is_multiple_of(1 << shift),
            false => self.0 >= 1 << shift,
        };
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let Some((unit, shift)) = units.into_iter().find(|(_, shift)| fits(*shift)) else {
            return write!(f, "{} B", self.0);
        };
        let tenths = ((u128::from(self.0) * 10) >> shift) as u64;
        match tenths % 10 {
            0 => write!(f, "{} {unit}", tenths / 10),
            part => write!(f, "{}.{part} {unit}", tenths / 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64k", 64 << 10),
            ("512M", 512 << 20),
            ("2G", 2 << 30),
            ("2 GiB", 2 << 30),
            ("1.5G", 3 << 29),
            ("0", 0),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in ["", "G", "-1", "2X", "1.2.3", "99999999999T", "1.1234567G"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn prints_one_decimal() {
        assert_eq!(Bytes(3 << 29).to_string(), "1.5 GiB");
        assert_eq!(Bytes(2 << 30).to_string(), "2 GiB");
        assert_eq!(Bytes(999).to_string(), "999 B");
    }

    #[test]
    fn prints_the_exact_number() {
        for (bytes, text) in
            [(3 << 29, "1536 MiB"), (2 << 30, "2 GiB"), (0, "0 B"), (1025, "1025 B")]
        {
            assert_eq!(alloc::format!("{:#}", Bytes(bytes)), text);
        }
    }
}
