//! A histogram of durations: fixed size, lock-free, within 7 % of the true value.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Number of buckets into which each power of two is split.
const PARTS: u64 = 8;
const BUCKETS: usize = 64 * PARTS as usize;

/// Number of groups of [`Latency::groups`].
pub const GROUPS: usize = GROUP_ENDS_NS.len() + 1;
/// Where the groups end, in nanoseconds; the last group has no end. A duration of exactly this is
/// in the next group. Powers of 4, from about a microsecond to about 17 s: so few that each VM can
/// publish them every second, and each is the border of a bucket, so that the groups are exact.
pub const GROUP_ENDS_NS: [u64; 13] = {
    let mut ends = [1 << GROUP_FIRST; 13];
    let mut group = 1;
    while group < ends.len() {
        ends[group] = ends[group - 1] << GROUP_POWERS;
        group += 1;
    }
    ends
};
/// Exponent of 2 at which the first group ends.
const GROUP_FIRST: u64 = 10;
/// Powers of two in each of the groups behind it.
const GROUP_POWERS: u64 = 2;

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
        Latency::percentile_of_all_ns(&[self], percent)
    }

    /// As [`Latency::percentile_ns`], of what all these have counted.
    pub fn percentile_of_all_ns(all: &[&Latency], percent: u64) -> Option<u64> {
        let counts: [u64; BUCKETS] =
            std::array::from_fn(|index| all.iter().map(|one| one.count(index)).sum());
        let rank = (counts.iter().sum::<u64>() * percent).div_ceil(100).max(1);
        let mut seen = 0;
        let index = counts.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(middle(index))
    }

    /// Returns how many durations were counted in each group, and their sum in ns, which is within
    /// 7 %. None of these ever decreases.
    pub fn groups(&self) -> ([u64; GROUPS], u64) {
        let (mut groups, mut sum_ns) = ([0; GROUPS], 0_u64);
        for index in 0..BUCKETS {
            let count = self.count(index);
            if let Some(group) = groups.get_mut(group(index)) {
                *group += count;
            }
            if count > 0 {
                sum_ns = sum_ns.saturating_add(middle(index).saturating_mul(count));
            }
        }
        (groups, sum_ns)
    }

    fn count(&self, index: usize) -> u64 {
        self.buckets.get(index).map_or(0, |bucket| bucket.load(Relaxed))
    }
}

/// The group that a bucket is in.
fn group(index: usize) -> usize {
    let exponent = index as u64 / PARTS + 2;
    match exponent.checked_sub(GROUP_FIRST) {
        None => 0,
        Some(above) => ((above / GROUP_POWERS) as usize + 1).min(GROUPS - 1),
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
    fn percentiles_of_several_are_those_of_all_durations() {
        let (short, long) = (Latency::default(), Latency::default());
        (0..98).for_each(|_| short.record(Duration::from_micros(1)));
        (0..2).for_each(|_| long.record(Duration::from_millis(1)));
        let both = |percent| Latency::percentile_of_all_ns(&[&short, &long], percent).unwrap();
        assert!(both(98) < 1100 && both(99) > 900_000, "{} {}", both(98), both(99));
    }

    #[test]
    fn a_group_ends_where_it_says() {
        assert_eq!(GROUP_ENDS_NS.first(), Some(&1024));
        assert_eq!(GROUP_ENDS_NS.last(), Some(&(1 << 34)));
        for (index, end) in GROUP_ENDS_NS.into_iter().enumerate() {
            let latency = Latency::default();
            for ns in [end - 1, end, 0] {
                latency.record(Duration::from_nanos(ns));
            }
            let mut expected = [0; GROUPS];
            expected[0] += 1;
            expected[index] += 1;
            expected[index + 1] += 1;
            let (groups, sum_ns) = latency.groups();
            assert_eq!(groups, expected, "{end}");
            assert!(sum_ns.abs_diff(2 * end) * 100 <= 2 * end * 7, "{sum_ns} for {}", 2 * end);
        }
        let latency = Latency::default();
        (0..3).for_each(|_| latency.record(Duration::MAX));
        let (groups, sum_ns) = latency.groups();
        assert_eq!((groups[GROUPS - 1], sum_ns), (3, u64::MAX));
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
