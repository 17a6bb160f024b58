//! A limit on a VM's resident memory, and the marks around it.

/// A thirty-second of the limit is kept free, half of it on average, for what the guest touches next,
const GAP_PART: u64 = 32;
/// within these bounds.
const GAP_BYTES: std::ops::RangeInclusive<u64> = (4 << 20)..=(64 << 20);
/// What no kernel can do without: itself and the metadata of its memory.
const FLOOR_BYTES: u64 = 48 << 20;
const FLOOR_PART: u64 = 64;

/// The least limit for a VM of `memory_bytes` that its guest survives.
pub fn floor_bytes(memory_bytes: u64) -> u64 {
    FLOOR_BYTES + memory_bytes / FLOOR_PART
}

/// A limit on the memory that a VM takes, its compressed pages included, and how it is
/// held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Marks {
    /// The limit.
    pub limit_bytes: u64,
    /// Above this the VM is under pressure: its faults wait.
    pub high_bytes: u64,
    /// Down to this it is relieved, under pressure or ahead of it.
    pub low_bytes: u64,
}

impl Marks {
    /// With the marks that were asked for, which are in order, and defaults for others.
    pub fn new(limit_bytes: u64, low_bytes: Option<u64>, high_bytes: Option<u64>) -> Marks {
        let gap = (limit_bytes / GAP_PART).clamp(*GAP_BYTES.start(), *GAP_BYTES.end());
        let below = |bytes: u64, part: u64| bytes.saturating_sub(gap / part);
        let high = match (high_bytes, low_bytes) {
            (Some(high), _) => high,
            (None, Some(low)) if low >= below(limit_bytes, 4) => limit_bytes,
            // What threads that see room bring together (`Room::room`).
            _ => below(limit_bytes, 4),
        };
        Marks { limit_bytes, high_bytes: high, low_bytes: low_bytes.unwrap_or(below(high, 2)) }
    }

    /// Above which eviction begins, and above which faults wait: in between is what the
    /// guest takes while the first frames are held.
    pub fn pressure(self) -> (u64, u64) {
        (self.low_bytes.midpoint(self.high_bytes), self.high_bytes)
    }

    /// The same after the worker's turn. Faults do not wait a little for room that nobody makes: where
    /// anything is in the way, or nothing may go up to that mark. While first touches wait for
    /// room (`waits`), the high mark tells which.
    pub fn for_faults(self, waits: bool, in_the_way: bool, vain: Option<u64>) -> (u64, u64) {
        match vain {
            _ if waits => self.pressure(),
            _ if in_the_way => (u64::MAX, u64::MAX),
            Some(mark) => (mark, u64::MAX),
            None => self.pressure(),
        }
    }
}

/// What is left to do after a step towards a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Left {
    /// The limit holds, or nothing else may go.
    Nothing,
    /// More is to go.
    More,
    /// The same, and what needs room in the store has none.
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
        for (in_the_way, vain) in [(true, None), (true, Some(50)), (false, Some(50))] {
            assert_eq!(marks.for_faults(true, in_the_way, vain), (25, 30), "for the halted ones");
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
