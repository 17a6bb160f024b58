//! Numbers in narrow columns.

/// Returns a size with three digits and the first letter of its unit, a power of 1024: `1.50G`.
pub fn size(bytes: u64) -> String {
    let units = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
    match units.into_iter().find(|(_, shift)| bytes >= 1 << shift) {
        None if bytes == 0 => "0".into(),
        None => format!("{bytes}B"),
        // More than any host has.
        Some(_) if bytes >= 9999 << 40 => ">9PiB".into(),
        Some((unit, shift)) => digits(bytes as f64 / (1u64 << shift) as f64) + unit,
    }
}

/// Returns a count with three digits, and `k` or `M` for thousands and millions.
pub fn count(count: u64) -> String {
    match count {
        0..10_000 => count.to_string(),
        10_000..999_500 => digits(count as f64 / 1e3) + "k",
        999_500..9_999_000_000 => digits(count as f64 / 1e6) + "M",
        _ => ">10G".into(),
    }
}

/// Returns three digits of a number, or the whole of a larger one.
fn digits(number: f64) -> String {
    match number {
        ..9.995 => format!("{number:.2}"),
        ..99.95 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

/// Returns thousandths as a percentage.
pub fn percent(permille: u32) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Columns have room for so much, and a blank or a mark.
    const WIDTH: usize = 5;

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1B"),
            (4096, "4.00K"),
            (1023 << 10, "1023K"),
            (512 << 20, "512M"),
            (3 << 29, "1.50G"),
            (64 << 30, "64.0G"),
            ((1 << 40) - (20 << 30), "1004G"),
            (12 << 40, "12.0T"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn no_number_is_wider_than_its_column() {
        for shift in 0..64 {
            let power = 1u64 << shift;
            for number in [power - 1, power, power + 1, power.saturating_mul(3), u64::MAX] {
                assert!(size(number).len() <= WIDTH, "{number}: {}", size(number));
                assert!(count(number).len() <= WIDTH, "{number}: {}", count(number));
            }
        }
    }
}
