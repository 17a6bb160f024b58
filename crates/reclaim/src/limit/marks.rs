//! A limit on a VM's resident memory, and the marks around it.

/// Gap below the limit: a 32nd of it. Half of the gap is free on average, for what the guest
/// touches next.
const GAP_PART: u64 = 32;
/// Bounds of the gap, in bytes.
const GAP_BYTES: std::ops::RangeInclusive<u64> = (4 << 20)..=(64 << 20);
/// What any kernel needs for itself.
const FLOOR_BYTES: u64 = 48 << 20;
/// Part of memory that its page metadata takes: a 64th.
const FLOOR_PART: u64 = 64;

/// The lowest limit that the guest of a VM of `memory_bytes` survives.
pub fn floor_bytes(memory_bytes: u64) -> u64 {
    FLOOR_BYTES + memory_bytes / FLOOR_PART
}

/// A limit on the memory that a VM takes, compressed pages included, and the marks that keep it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Marks {
    /// The limit.
    pub limit_bytes: u64,
    /// Above this, the VM is under pressure and its faults wait.
    pub high_bytes: u64,
    /// Down to this, memory is evicted, under pressure or ahead of it.
    pub low_bytes: u64,
}

impl Marks {
    /// Uses the marks that were asked for, which must be in order, and defaults for others.
    pub fn new(limit_bytes: u64, low_bytes: Option<u64>, high_bytes: Option<u64>) -> Marks {
        let gap = (limit_bytes / GAP_PART).clamp(*GAP_BYTES.start(), *GAP_BYTES.end());
        let below = |bytes: u64, part: u64| bytes.saturating_sub(gap / part);
        let high = match (high_bytes, low_bytes) {
            (Some(high), _) => high,
            (None, Some(low)) if low >= below(limit_bytes, 4) => limit_bytes,
            // Leaves room for what threads that see room bring in together (`Room::room`).
            _ => below(limit_bytes, 4),
        };
        Marks { limit_bytes, high_bytes: high, low_bytes: low_bytes.unwrap_or(below(high, 2)) }
    }

    /// The bytes taken above which eviction begins, and those above which faults wait. Between them
    /// is what the guest takes while the first frames are locked.
    pub fn pressure(self) -> (u64, u64) {
        (self.low_bytes.midpoint(self.high_bytes), self.high_bytes)
    }

    /// The same after the worker's turn. Faults need not wait for room that nobody makes: because
    /// something is in the way (`is_blocked`), or because nothing may be evicted up to the mark
    /// `vain`. While first touches wait for room (`waits`), the high mark tells which ones.
    pub fn for_faults(self, waits: bool, is_blocked: bool, vain: Option<u64>) -> (u64, u64) {
        match vain {
            _ if waits => self.pressure(),
            _ if is_blocked => (u64::MAX, u64::MAX),
            Some(mark) => (mark, u64::MAX),
            None => self.pressure(),
        }
    }
}

/// What is left to do after a step towards a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Left {
    /// The limit holds, or nothing else may be evicted.
    Nothing,
    /// More has to be evicted.
    More,
    /// More has to be evicted, but the store has no room for frames that need it.
    MoreWithoutRoom,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marks_lie_below_the_limit() {
        for limit in [64 << 20, 100 << 20, 1 << 30, 1u64 << 40] {
            let Marks { high_bytes: high, low_bytes: low, .. } = Marks::new(limit, None, None);
            assert!(low < high && high < limit, "{limit}: {high}, {low}");
            assert!(low >= limit / 10 * 9, "{limit}: {low}");
        }
    }

    #[test]
    fn faults_wait_for_room_that_somebody_makes() {
        let marks = Marks { limit_bytes: 40, high_bytes: 30, low_bytes: 20 };
        assert_eq!(marks.for_faults(false, false, None), (25, 30));
        assert_eq!(marks.for_faults(false, false, Some(50)), (50, u64::MAX));
        assert_eq!(marks.for_faults(false, true, Some(50)), (u64::MAX, u64::MAX));
        for (is_blocked, vain) in [(true, None), (true, Some(50)), (false, Some(50))] {
            assert_eq!(marks.for_faults(true, is_blocked, vain), (25, 30), "for the halted ones");
        }
    }

    #[test]
    fn marks_that_were_asked_for_are_kept_and_in_order() {
        let limit = 200 << 20;
        for (low, high) in [
            (Some(100 << 20), None),
            (Some(limit - 1), None),
            (None, Some(100 << 20)),
            (None, Some(limit)),
            (Some(100 << 20), Some(120 << 20)),
        ] {
            let marks = Marks::new(limit, low, high);
            assert!(marks.low_bytes < marks.high_bytes && marks.high_bytes <= limit, "{marks:?}");
            assert!(low.is_none_or(|low| low == marks.low_bytes), "{marks:?}");
            assert!(high.is_none_or(|high| high == marks.high_bytes), "{marks:?}");
        }
    }
}
