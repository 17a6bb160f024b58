//! Free memory that is not reclaimed for a while, because it came back although the guest did not
//! use it.
//!
//! A kernel also writes a free block's metadata when it merges the block with its buddy, or takes
//! the block's neighbour on a list. What did so once is likely to do so again soon: a block that
//! comes back is reclaimed again in the next pass, and then comes back again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ebb_units::Gfn;

/// Frames of a unit: the largest block of a kernel. Merges and splits within it change the heads of
/// blocks, but not their unit.
const UNIT_FRAMES: u64 = 1024;
/// How long a unit rests that came back for the first time.
const REST_LEAST: Duration = Duration::from_secs(2);
/// Longest rest.
const REST_MOST: Duration = Duration::from_secs(256);

/// The units that rest, or have rested lately. There are no more than the guest's RAM has.
#[derive(Default)]
pub struct Resting {
    units: HashMap<u64, Rest>,
}

struct Rest {
    until: Instant,
    length: Duration,
}

impl Resting {
    /// Notes that a block came back, and whether the guest has used it since. A unit rests twice as
    /// long as the last time if it comes back soon after its rest.
    pub fn note(&mut self, head: Gfn, is_used: bool, now: Instant) {
        let unit = head.0 / UNIT_FRAMES;
        if is_used {
            self.units.remove(&unit);
            return;
        }
        let rest = self.units.entry(unit).or_insert(Rest { until: now, length: Duration::ZERO });
        // Both halves of a unit may come back at once.
        if rest.until <= now {
            rest.length = (rest.length * 2).clamp(REST_LEAST, REST_MOST);
            rest.until = now + rest.length;
        }
    }

    /// Whether the block at this frame is to be left alone.
    pub fn rests(&self, head: Gfn, now: Instant) -> bool {
        self.units.get(&(head.0 / UNIT_FRAMES)).is_some_and(|rest| now < rest.until)
    }

    /// Forgets the units that have not come back for as long as they have rested.
    pub fn forget_old(&mut self, now: Instant) {
        self.units.retain(|_, rest| now < rest.until + rest.length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Gfn = Gfn(5 * UNIT_FRAMES + 512);
    const SAME: Gfn = Gfn(5 * UNIT_FRAMES);
    const OTHER: Gfn = Gfn(6 * UNIT_FRAMES);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_unit_rests_longer_each_time() {
        let (mut resting, mut now) = (Resting::default(), Instant::now());
        for length in [2, 4, 8, 16, 32, 64, 128, 256, 256] {
            resting.note(HEAD, false, now);
            assert!(resting.rests(SAME, now + seconds(length) - Duration::from_nanos(1)));
            assert!(!resting.rests(SAME, now + seconds(length)));
            assert!(!resting.rests(OTHER, now));
            now += seconds(length);
            resting.forget_old(now);
        }
    }

    #[test]
    fn two_blocks_of_a_unit_count_once() {
        let (mut resting, now) = (Resting::default(), Instant::now());
        resting.note(HEAD, false, now);
        resting.note(SAME, false, now);
        assert!(!resting.rests(HEAD, now + seconds(2)));
    }

    #[test]
    fn memory_that_was_used_does_not_rest() {
        let (mut resting, now) = (Resting::default(), Instant::now());
        resting.note(HEAD, false, now);
        resting.note(SAME, true, now);
        assert!(!resting.rests(HEAD, now));
    }

    #[test]
    fn a_unit_that_stayed_away_starts_again() {
        let (mut resting, now) = (Resting::default(), Instant::now());
        resting.note(HEAD, false, now);
        let later = now + seconds(4);
        resting.forget_old(later);
        assert!(resting.units.is_empty());
        resting.note(HEAD, false, later);
        assert!(!resting.rests(HEAD, later + seconds(2)));
    }
}
