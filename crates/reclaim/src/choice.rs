//! Which of the frames that were looked at to evict.

use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, HugeFrame};

use crate::cost::{Cost, Work};

/// Most frames of a huge frame to break up that count as likely to be evicted at once.
const OF_BROKEN: usize = FRAMES_PER_HUGE as usize / 4;

/// Candidates, in the order in which they were found.
pub(crate) struct Choice {
    want: usize,
    candidates: Vec<Candidate>,
    rest: usize,
}

/// What to do with frames.
#[derive(Clone, Copy)]
enum What {
    /// Evict them.
    Go,
    /// Break up the huge frame that they are. At most `can_go` of its frames can be evicted.
    Break { can_go: usize },
}

#[derive(Clone, Copy)]
struct Candidate {
    cost: Cost,
    what: What,
    frames: FrameRange,
    may_go: bool,
}

/// What was chosen, the cheapest first.
#[derive(Default)]
pub(crate) struct Chosen {
    pub(crate) go: Vec<(FrameRange, Cost)>,
    pub(crate) to_break: Vec<HugeFrame>,
    /// Frames still to be found in the huge frames to break up.
    pub(crate) missing: usize,
}

impl Choice {
    /// A choice of about `want` frames.
    pub(crate) fn new(want: usize) -> Choice {
        Choice { want, candidates: Vec::new(), rest: 0 }
    }

    /// Whether enough frames were found that are at rest and may be evicted.
    pub(crate) fn is_full(&self) -> bool {
        self.rest >= self.want
    }

    /// Adds frames that are evicted together. Asks `may_go` only where it counts: for frames at
    /// rest, while the choice is not full.
    pub(crate) fn add(&mut self, frames: FrameRange, cost: Cost, may_go: impl Fn(Gfn) -> bool) {
        let counts = cost.work == Work::AtRest && !self.is_full();
        if counts && !frames.frames().all(may_go) {
            return;
        }
        self.rest += if counts { frames.count as usize } else { 0 };
        self.candidates.push(Candidate { cost, what: What::Go, frames, may_go: counts });
    }

    /// Adds a huge frame that may be broken up. Of its frames `can_go` can be evicted, at `cost` on
    /// average.
    pub(crate) fn may_break(&mut self, huge: HugeFrame, cost: Cost, can_go: usize) {
        let (what, frames) = (What::Break { can_go }, FrameRange::huge(huge));
        self.candidates.push(Candidate { cost, what, frames, may_go: true });
    }

    /// Returns the cheapest candidates that may be evicted or broken up.
    pub(crate) fn cheapest(mut self, may_go: impl Fn(Gfn) -> bool) -> Chosen {
        // Stable: of the same cost, what is evicted comes before what is broken up, then the first
        // found.
        let is_broken = |what| matches!(what, What::Break { .. });
        self.candidates.sort_by_key(|candidate| (candidate.cost, is_broken(candidate.what)));
        let (mut chosen, mut found) = (Chosen::default(), 0);
        for it in self.candidates {
            if found >= self.want {
                break;
            }
            if !it.may_go && !it.frames.frames().all(&may_go) {
                continue;
            }
            match it.what {
                What::Go => {
                    found += it.frames.count as usize;
                    chosen.go.push((it.frames, it.cost));
                }
                What::Break { can_go } => {
                    let likely = can_go.min(OF_BROKEN);
                    found += likely;
                    chosen.missing += likely;
                    chosen.to_break.push(it.frames.start.huge());
                }
            }
        }
        chosen
    }
}

/// A huge frame to evict whole, or to break up.
pub(crate) struct Whole {
    costs: Vec<Cost>,
}

impl Whole {
    /// `costs`: of those of its frames that can be evicted.
    pub(crate) fn new(costs: Vec<Cost>) -> Whole {
        Whole { costs }
    }

    /// Cost of the whole huge frame: that of its dearest frame. `None`: a part of it must stay.
    pub(crate) fn cost(&self) -> Option<Cost> {
        let is_whole = self.costs.len() as u64 == FRAMES_PER_HUGE;
        self.costs.iter().max().copied().filter(|_| is_whole)
    }

    /// Average cost and number of the frames that can be evicted one by one. `None`: there are
    /// none.
    pub(crate) fn average(&self) -> Option<(Cost, usize)> {
        Some((Cost::average(&self.costs)?, self.costs.len()))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ebb_inspect::PageKind::{Anonymous, File};

    use super::*;
    use crate::cost::Page;
    use crate::uses::Uses;

    fn cost(kind: ebb_inspect::PageKind, uses: Uses) -> Cost {
        Page { kind: Some(kind), ..Page::default() }.cost(uses).unwrap()
    }

    fn one(gfn: u64) -> FrameRange {
        FrameRange::new(Gfn(gfn), 1)
    }

    #[test]
    fn the_cheapest_that_may_go_are_chosen() {
        let may_go = |gfn| gfn != Gfn(5) && gfn != Gfn(0);
        let mut choice = Choice::new(4);
        for gfn in 0..4 {
            choice.add(one(gfn), cost(Anonymous, Uses::NOW), may_go);
        }
        for gfn in 4..7 {
            choice.add(one(gfn), cost(File, Uses::unused_for(1)), may_go);
        }
        assert_eq!((choice.rest, choice.is_full()), (2, false));
        let chosen = choice.cheapest(may_go);
        let chosen: Vec<(u64, Work)> =
            chosen.go.iter().map(|(frames, cost)| (frames.start.0, cost.work)).collect();
        let (at_rest, recent) = (Work::AtRest, Work::Recent);
        assert_eq!(chosen, [(4, at_rest), (6, at_rest), (1, recent), (2, recent)]);
    }

    #[test]
    fn a_huge_frame_that_costs_more_than_the_frames_that_go_stays_whole() {
        let chosen = |want| {
            let mut choice = Choice::new(want);
            choice.may_break(HugeFrame(1), cost(Anonymous, Uses::NOW), 512);
            choice.may_break(HugeFrame(2), cost(Anonymous, Uses::OFTEN), 99);
            for (frames, uses) in [(0..100, Uses::BEFORE), (100..200, Uses::OFTEN)] {
                let cost = cost(Anonymous, uses);
                frames.for_each(|gfn| choice.add(one(gfn), cost, |_| true));
            }
            let Chosen { go, to_break, missing } = choice.cheapest(|_| true);
            (go.len(), to_break, missing)
        };
        assert_eq!(chosen(100), (100, vec![], 0));
        assert_eq!(chosen(101), (100, vec![HugeFrame(1)], 128));
        assert_eq!(chosen(328), (200, vec![HugeFrame(1)], 128));
        assert_eq!(chosen(329), (200, vec![HugeFrame(1), HugeFrame(2)], 227));
    }

    #[test]
    fn of_huge_frames_that_cost_the_same_the_first_is_broken_up() {
        let mut choice = Choice::new(64);
        choice.may_break(HugeFrame(1), cost(Anonymous, Uses::NOW), 200);
        choice.may_break(HugeFrame(2), cost(Anonymous, Uses::NOW), 100);
        assert_eq!(choice.cheapest(|_| true).to_break, [HugeFrame(1)]);
    }

    /// `may_go` is not asked about each frame that is cheap.
    #[test]
    fn no_more_is_asked_than_counts() {
        let asked = Cell::new(0);
        let may_go = |_| {
            asked.set(asked.get() + 1);
            true
        };
        let mut choice = Choice::new(4);
        (0..100).for_each(|gfn| choice.add(one(gfn), cost(File, Uses::unused_for(1)), may_go));
        assert!(choice.is_full());
        assert_eq!((choice.cheapest(may_go).go.len(), asked.get()), (4, 4));
    }
}
