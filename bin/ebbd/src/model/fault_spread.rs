//! What counts of faults, by how long they took, say of their quantiles.

use ebb_api::FaultSpread;
use ebb_pager::{GROUP_ENDS_NS, GROUPS};

/// Where the last group begins.
const LAST_BEGIN_NS: u64 = GROUP_ENDS_NS[GROUP_ENDS_NS.len() - 1];
/// How many times longer a group's longest times are than its shortest ones.
const GROUP_FACTOR: f64 = (GROUP_ENDS_NS[1] / GROUP_ENDS_NS[0]) as f64;

/// Returns what these counts say, which are by the groups of [`GROUP_ENDS_NS`].
pub fn spread(counts: &[u64; GROUPS]) -> FaultSpread {
    let used = counts.iter().rposition(|&count| count > 0).map_or(0, |last| last + 1);
    FaultSpread {
        counts: counts.iter().take(used).copied().collect(),
        p50: quantile_ns(counts, 50),
        p99: quantile_ns(counts, 99),
    }
}

/// The time that `percent` of these did not exceed, as if the times within a group lay evenly on a
/// logarithmic scale. None: there are none.
fn quantile_ns(counts: &[u64; GROUPS], percent: u128) -> Option<u64> {
    let counts = counts.map(u128::from);
    let rank = (counts.iter().sum::<u128>() * percent).div_ceil(100).max(1);
    let mut before = 0;
    for (group, count) in counts.into_iter().enumerate() {
        if before + count >= rank {
            return Some(within(group, (rank - before) as f64 / count as f64));
        }
        before += count;
    }
    None
}

/// The time that this part of a group's times does not exceed.
fn within(group: usize, part: f64) -> u64 {
    match GROUP_ENDS_NS.get(group) {
        Some(&end) => (end as f64 * GROUP_FACTOR.powf(part - 1.0)) as u64,
        None => LAST_BEGIN_NS,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ebb_pager::Latency;

    use super::*;

    #[test]
    fn quantiles_are_right_to_a_factor_of_4() {
        let latency = Latency::default();
        (1..=1000).for_each(|number| latency.record(Duration::from_nanos(number * number * 40)));
        let found = spread(&latency.groups().0);
        for (found, percent) in [(found.p50, 50), (found.p99, 99)] {
            let (found, truth) = (found.unwrap(), latency.percentile_ns(percent).unwrap());
            assert!(found <= 4 * truth && truth <= 4 * found, "p{percent}: {found} for {truth}");
        }
    }

    #[test]
    fn a_quantile_lies_in_its_group() {
        let mut counts = [0; GROUPS];
        (counts[0], counts[5]) = (98, 2);
        let found = spread(&counts);
        assert_eq!(found.counts, [98, 0, 0, 0, 0, 2]);
        assert!(found.p50.is_some_and(|ns| ns < GROUP_ENDS_NS[0]), "{found:?}");
        // The first of the group's two faults: half of the way, on a logarithmic scale.
        let middle = GROUP_ENDS_NS[5] / 2;
        assert!(found.p99.is_some_and(|ns| ns.abs_diff(middle) <= 1), "{found:?}");
        counts[0] = 1000;
        assert!(spread(&counts).p99.is_some_and(|ns| ns < GROUP_ENDS_NS[0]));
    }

    #[test]
    fn counts_at_their_bounds_have_quantiles() {
        let none = spread(&[0; GROUPS]);
        assert_eq!(none, FaultSpread::default());
        let mut long = [0; GROUPS];
        long[GROUPS - 1] = 1;
        let long = spread(&long);
        assert_eq!((long.counts.len(), long.p50), (GROUPS, Some(LAST_BEGIN_NS)));
        assert_eq!(spread(&[u64::MAX; GROUPS]).p99, Some(LAST_BEGIN_NS));
    }
}
