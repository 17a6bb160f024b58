//! A histogram of durations: fixed size, lock-free, within 7 % of the true value.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Number of buckets into which each power of two is split.
const PARTS: u64 = 8;
const BUCKETS: usize = 64 * PARTS as usize;

/// Durations, counted by size.
pub struct Latency {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Latency {
    fn default() -> Latency {
        Latency { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl Latency {
    /// Counts one duration.
    pub fn record(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        if let Some(bucket) = self.buckets.get(bucket(ns)) {
            bucket.fetch_add(1, Relaxed);
        }
    }

    /// Returns the duration, in ns, that `percent` of the counted ones did not exceed; `None`
    /// before the first.
    pub fn percentile_ns(&self, percent: u64) -> Option<u64> {
        let total: u64 = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum();
        let rank = (total * percent).div_ceil(100).max(1);
        let mut seen = 0;
        let index = self.buckets.iter().position(|bucket| {
            seen += bucket.load(Relaxed);
            seen >= rank
        })?;
        Some(middle(index))
    }
}

fn bucket(ns: u64) -> usize {
    if ns < PARTS {
        return ns as usize;
    }
    let exponent = u64::from(ns.ilog2());
    let part = ns >> (exponent - PARTS.ilog2() as u64) & (PARTS - 1);
    ((exponent - 2) * PARTS + part) as usize
}

fn middle(index: usize) -> u64 {
    let index = index as u64;
    if index < PARTS {
        return index;
    }
    let exponent = index / PARTS + 2;
    let step = 1u64 << (exponent - PARTS.ilog2() as u64);
    (PARTS + index % PARTS) * step + step / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_close() {
        let latency = Latency::default();
        assert_eq!(latency.percentile_ns(50), None);
        (1..=1000u64).for_each(|n| latency.record(Duration::from_nanos(n * 10)));
        for (percent, truth) in [(1, 100u64), (50, 5000), (99, 9900), (100, 10000)] {
            let got = latency.percentile_ns(percent).unwrap();
            assert!(got.abs_diff(truth) * 100 <= truth * 7, "p{percent}: {got} for {truth}");
        }
    }

    #[test]
    fn every_duration_has_a_bucket() {
        for ns in [0, 1, 7, 8, 9, 1 << 20, u64::MAX] {
            assert!(bucket(ns) < BUCKETS);
        }
        for index in PARTS as usize..200 {
            assert_eq!(bucket(middle(index)), index);
        }
    }
}
