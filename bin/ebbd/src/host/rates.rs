//! How often something happens in a VM, by two of its publications.

use std::time::{Duration, Instant};

use ebb_api::VmStatus;

/// Shortest time over which a rate is taken: a command makes a VM publish twice at once.
const LEAST: Duration = Duration::from_millis(500);
/// Longest time over which it is taken. After more than that, the past does not count.
const MOST: Duration = Duration::from_secs(10);

/// What happened in a second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PerSecond {
    /// Faults that were served.
    pub faults: u64,
    /// Evicted memory that came back less than 30 s after its eviction.
    pub refaulted_bytes: u64,
}

/// Totals of a VM's process.
#[derive(Clone, Copy)]
struct Totals {
    at: Instant,
    faults: u64,
    refaulted_bytes: u64,
}

/// The rates of one VM.
#[derive(Default)]
pub struct Rates {
    /// Where the next rate begins. `None`: the VM has not published yet.
    from: Option<Totals>,
    last: Option<PerSecond>,
}

impl Rates {
    /// Takes what the VM's process published. `at`: when the figures were true.
    pub fn take(&mut self, at: Instant, status: &VmStatus) {
        let faults = status.faults.missing.saturating_add(status.faults.metadata);
        let refaulted_bytes = status.limit.refaulted_total_bytes;
        let now = Totals { at, faults, refaulted_bytes };
        let from = *self.from.get_or_insert(now);
        let elapsed = at.saturating_duration_since(from.at);
        // The totals of the next process begin at 0.
        let begins_anew = faults < from.faults || refaulted_bytes < from.refaulted_bytes;
        if begins_anew || elapsed > MOST {
            (self.from, self.last) = (Some(now), None);
        } else if elapsed >= LEAST {
            let per_second = |bytes: u64| per_second(bytes, elapsed);
            let faults = per_second(faults - from.faults);
            let refaulted_bytes = per_second(refaulted_bytes - from.refaulted_bytes);
            (self.from, self.last) = (Some(now), Some(PerSecond { faults, refaulted_bytes }));
        }
    }

    /// The last rates; none: not known.
    pub fn last(&self) -> Option<PerSecond> {
        self.last
    }
}

fn per_second(count: u64, elapsed: Duration) -> u64 {
    let rate = u128::from(count) * 1000 / elapsed.as_millis().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing;

    /// Publications at milliseconds, with so many faults and refaulted bytes.
    fn rates(publications: &[(u64, u64, u64)]) -> Option<PerSecond> {
        let (mut rates, began) = (Rates::default(), Instant::now());
        for (ms, faults, bytes) in publications {
            let mut status = testing::status();
            status.faults.missing = *faults;
            status.limit.refaulted_total_bytes = *bytes;
            rates.take(began + Duration::from_millis(*ms), &status);
        }
        rates.last()
    }

    #[test]
    fn a_rate_is_what_came_in_a_second() {
        assert_eq!(rates(&[(0, 70, 4096)]), None);
        let last = rates(&[(0, 70, 4096), (2000, 90, 12_288)]);
        assert_eq!(last, Some(PerSecond { faults: 10, refaulted_bytes: 4096 }));
        // Figures that come at once after others are taken with the next ones.
        let last = rates(&[(0, 0, 0), (10, 50, 0), (1000, 100, 0)]);
        assert_eq!(last, Some(PerSecond { faults: 100, refaulted_bytes: 0 }));
    }

    #[test]
    fn a_new_process_and_a_long_silence_have_no_rate() {
        assert_eq!(rates(&[(0, 70, 0), (1000, 90, 0), (2000, 0, 0)]), None);
        assert_eq!(rates(&[(0, 70, 0), (60_000, 90, 0)]), None);
        let last = rates(&[(0, 70, 0), (1000, 3, 0), (2000, 5, 0)]);
        assert_eq!(last.map(|last| last.faults), Some(2));
        assert_eq!(rates(&[(0, 0, 0), (500, u64::MAX, u64::MAX)]).unwrap().faults, u64::MAX);
    }
}
