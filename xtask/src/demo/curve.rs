//! Sums over figures that were taken at uneven times.

use std::time::Duration;

const GIB: f64 = (1u64 << 30) as f64;

/// Converts bytes to GiB.
pub fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB
}

/// Returns GiB times seconds below the straight lines from point to point.
pub fn gib_seconds(points: &[(Duration, u64)]) -> f64 {
    let piece = |pair: &[(Duration, u64)]| {
        let seconds = pair[1].0.saturating_sub(pair[0].0).as_secs_f64();
        (gib(pair[0].1) + gib(pair[1].1)) / 2.0 * seconds
    };
    points.windows(2).map(piece).sum()
}

/// Returns the mean over the time from the first point to the last, in GiB.
pub fn mean_gib(points: &[(Duration, u64)]) -> f64 {
    match (points.first(), points.last()) {
        (Some(first), Some(last)) if last.0 > first.0 => {
            gib_seconds(points) / (last.0 - first.0).as_secs_f64()
        }
        _ => 0.0,
    }
}

/// Returns the largest figure, in GiB.
pub fn peak_gib(points: &[(Duration, u64)]) -> f64 {
    gib(points.iter().map(|point| point.1).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_times_weigh_as_long_as_they_last() {
        let at = |seconds, gib: u64| (Duration::from_secs(seconds), gib << 30);
        let points = [at(0, 0), at(2, 2), at(3, 2), at(3, 1), at(7, 1)];
        assert_eq!(gib_seconds(&points), 2.0 + 2.0 + 4.0);
        assert_eq!(mean_gib(&points), 8.0 / 7.0);
        assert_eq!(peak_gib(&points), 2.0);
        assert_eq!(mean_gib(&points[..1]), 0.0);
    }
}
