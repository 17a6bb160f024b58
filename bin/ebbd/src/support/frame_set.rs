//! A large set of frames, queried frame by frame.

use ebb_units::{FrameRange, Gfn};

/// Runs in order that neither touch nor overlap, however the guest has scattered the ranges.
#[derive(Default)]
pub struct FrameSet {
    runs: Vec<FrameRange>,
}

impl FrameSet {
    /// The set of all frames of these ranges, which may come in any order and overlap.
    pub fn new(mut ranges: Vec<FrameRange>) -> FrameSet {
        ranges.retain(|range| range.count > 0);
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, run| {
            let meets = next.start <= run.end();
            if meets {
                run.count = run.end().max(next.end()).0 - run.start.0;
            }
            meets
        });
        FrameSet { runs: ranges }
    }

    /// The runs, in order.
    pub fn runs(&self) -> &[FrameRange] {
        &self.runs
    }

    /// Whether the set contains the frame.
    pub fn contains(&self, gfn: Gfn) -> bool {
        self.find(gfn, |_| {})
    }

    /// Whether the set contains the frame. Calls `look` for every run that it looks at.
    fn find(&self, gfn: Gfn, mut look: impl FnMut(&FrameRange)) -> bool {
        let behind = self.runs.partition_point(|run| {
            look(run);
            run.start <= gfn
        });
        behind.checked_sub(1).is_some_and(|at| self.runs[at].contains(gfn))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, count: u64) -> FrameRange {
        FrameRange::new(Gfn(first), count)
    }

    #[test]
    fn ranges_that_meet_become_one() {
        let ranges = vec![run(20, 5), run(0, 2), run(9, 0), run(2, 3), run(22, 1), run(4, 4)];
        let set = FrameSet::new(ranges);
        assert_eq!(set.runs(), [run(0, 8), run(20, 5)]);
        let found: Vec<u64> = (0..30).filter(|&gfn| set.contains(Gfn(gfn))).collect();
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23, 24]);
        assert!(!FrameSet::default().contains(Gfn(0)));
    }

    /// A guest chooses where its page metadata lies, in as many pieces as it likes.
    #[test]
    fn scattered_metadata_costs_a_few_looks_a_frame() {
        const RUNS: u64 = 5000;
        // No two frames are adjacent, and the last one comes first.
        let set = FrameSet::new((0..RUNS).rev().map(|index| run(index * 2, 1)).collect());
        assert_eq!(set.runs().len() as u64, RUNS);
        for gfn in 0..RUNS * 2 + 2 {
            let mut looks = 0;
            let found = set.find(Gfn(gfn), |_| looks += 1);
            assert_eq!(found, gfn % 2 == 0 && gfn < RUNS * 2);
            assert!(looks <= 14, "{looks} looks at {RUNS} runs");
        }
    }
}
