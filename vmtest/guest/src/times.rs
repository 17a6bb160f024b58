//! How long something took each time: how often, and the greatest times.

use std::fmt;

/// Buckets for each doubling of a time. The upper bound of a bucket is 9 % above its lower bound.
const PER_DOUBLING: f64 = 8.0;
/// Buckets up to the longest time.
const BUCKETS: usize = 64 * PER_DOUBLING as usize;
/// A time of at least so many microseconds is slow.
const SLOW_US: u64 = 100_000;

/// Times in microseconds. As text: how many, one that 99 of 100 do not exceed, the longest, and how
/// many are slow.
pub struct Times {
    buckets: [u64; BUCKETS],
    longest_us: u64,
    slow: u64,
}

impl Default for Times {
    fn default() -> Times {
        Times { buckets: [0; BUCKETS], longest_us: 0, slow: 0 }
    }
}

impl Times {
    /// Adds a time.
    pub fn add(&mut self, us: u64) {
        let bucket = (us.max(1) as f64).log2() * PER_DOUBLING;
        self.buckets[(bucket as usize).min(BUCKETS - 1)] += 1;
        self.longest_us = self.longest_us.max(us);
        self.slow += u64::from(us >= SLOW_US);
    }

    fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns a time that 99 of 100 do not exceed; 0 of no times.
    fn p99_us(&self) -> u64 {
        let (rank, mut seen) = ((self.count() * 99).div_ceil(100), 0_u64);
        let bucket = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        let bound = bucket.map_or(0.0, |bucket| ((bucket + 1) as f64 / PER_DOUBLING).exp2());
        (bound.ceil() as u64).min(self.longest_us)
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.count(), self.p99_us(), self.longest_us, self.slow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(times: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut all = Times::default();
        times.into_iter().for_each(|us| all.add(us));
        all.to_string().split(' ').map(|word| word.parse().unwrap()).collect()
    }

    #[test]
    fn one_of_a_hundred_times_exceeds_the_99th_percentile() {
        let [count, p99, longest, slow] = figures(1..=1000)[..] else { panic!("four figures") };
        assert_eq!((count, longest, slow), (1000, 1000, 0));
        assert!((990..=1000).contains(&p99), "{p99}");
        // The greatest two of 200.
        let few = (0..198).map(|_| 10).chain([SLOW_US, SLOW_US * 70]);
        let [count, p99, longest, slow] = figures(few)[..] else { panic!("four figures") };
        assert_eq!((count, longest, slow), (200, SLOW_US * 70, 2));
        assert!((10..12).contains(&p99), "{p99}");
    }

    #[test]
    fn no_times_and_the_longest_are_within_the_buckets() {
        assert_eq!(figures([]), [0, 0, 0, 0]);
        assert_eq!(figures([0]), [1, 0, 0, 0]);
        assert_eq!(figures([u64::MAX]), [1, u64::MAX, u64::MAX, 1]);
    }
}
