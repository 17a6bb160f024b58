//! A threshold of the host's available memory, as people write it.

use std::str::FromStr;

use ebb_units::Bytes;

/// A size, written as other sizes are, or a part of all memory, written `10%`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Below {
    Percent(u32),
    Size(Bytes),
}

impl Below {
    pub fn percent(self) -> Option<u32> {
        match self {
            Below::Percent(percent) => Some(percent),
            Below::Size(_) => None,
        }
    }

    pub fn bytes(self) -> Option<u64> {
        match self {
            Below::Percent(_) => None,
            Below::Size(size) => Some(size.0),
        }
    }
}

impl From<Below> for ebb_policy::pressure::Below {
    fn from(below: Below) -> ebb_policy::pressure::Below {
        match below {
            Below::Percent(percent) => ebb_policy::pressure::Below::Percent(percent),
            Below::Size(size) => ebb_policy::pressure::Below::Bytes(size.0),
        }
    }
}

impl FromStr for Below {
    type Err = String;

    fn from_str(text: &str) -> Result<Below, String> {
        match text.strip_suffix('%') {
            Some(percent) => percent
                .parse()
                .map(Below::Percent)
                .map_err(|_| format!("{text:?} is no percentage: write a whole number, as in 10%")),
            None => text.parse().map(Below::Size).map_err(|error| {
                let error: <Bytes as FromStr>::Err = error;
                format!("{error}, or 10%")
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_a_size_or_a_part() {
        for (text, below) in [
            ("10%", Below::Percent(10)),
            ("0%", Below::Percent(0)),
            ("0", Below::Size(Bytes(0))),
            ("1.5G", Below::Size(Bytes(3 << 29))),
        ] {
            assert_eq!(text.parse(), Ok(below), "{text}");
        }
        for text in ["", "%", "-1%", "1.5%", "5 %", "10%%", "99999999999%", "ten"] {
            let refused = text.parse::<Below>().unwrap_err();
            assert!(refused.contains("10%") && !refused.contains('\n'), "{refused}");
        }
    }
}
