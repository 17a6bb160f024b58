//! What of the frames that were looked at is to go.

use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::cost::{Cost, Work};

/// Candidates, in the order in which they were found.
pub(crate) struct Choice {
    /// Frames that go whole, so many.
    unit: u64,
    candidates: Vec<(Cost, Gfn)>,
    rest: usize,
}

impl Choice {
    pub(crate) fn new(unit: u64) -> Choice {
        Choice { unit, candidates: Vec::new(), rest: 0 }
    }

    /// How many frames were found that nobody misses soon.
    pub(crate) fn rest(&self) -> usize {
        self.rest
    }

    /// A unit that begins with this frame.
    pub(crate) fn add(&mut self, first: Gfn, cost: Cost) {
        if cost.work == Work::Rests {
            self.rest += self.unit as usize;
        }
        self.candidates.push((cost, first));
    }

    /// About `want` frames in units that `may_go`, those that cost least first.
    pub(crate) fn cheapest(
        mut self,
        want: usize,
        may_go: impl Fn(Gfn) -> bool,
    ) -> impl Iterator<Item = (FrameRange, Cost)> {
        // Stable: of those that cost the same the first one found.
        self.candidates.sort_by_key(|(cost, _)| *cost);
        let unit = self.unit;
        let units = self.candidates.into_iter();
        let units = units.map(move |(cost, first)| (FrameRange::new(first, unit), cost));
        let may_go = move |(frames, _): &(FrameRange, Cost)| frames.frames().all(&may_go);
        units.filter(may_go).take(want.div_ceil(unit as usize))
    }
}

/// A huge frame that goes whole: as dear as its dearest frame.
#[derive(Default)]
pub(crate) struct Whole {
    frames: u64,
    dearest: Option<Cost>,
}

impl Whole {
    /// One of its frames, if that can go.
    pub(crate) fn add(&mut self, cost: Option<Cost>) {
        self.frames += u64::from(cost.is_some());
        self.dearest = self.dearest.max(cost);
    }

    /// `None`: a part of it stays.
    pub(crate) fn cost(&self) -> Option<Cost> {
        self.dearest.filter(|_| self.frames == FRAMES_PER_HUGE)
    }
}

#[cfg(test)]
mod tests {
    use ebb_inspect::PageKind::{Anonymous, File};

    use super::*;
    use crate::cost::{Page, Used};

    fn cost(kind: ebb_inspect::PageKind, used: Used) -> Cost {
        Page { kind: Some(kind), ..Page::default() }.cost(used).unwrap()
    }

    #[test]
    fn the_cheapest_that_may_go_are_chosen() {
        let mut choice = Choice::new(1);
        for gfn in 0..4 {
            choice.add(Gfn(gfn), cost(Anonymous, Used::Now));
        }
        (4..7).for_each(|gfn| choice.add(Gfn(gfn), cost(File, Used::Rests(1))));
        assert_eq!(choice.rest(), 3);
        let chosen = choice.cheapest(4, |gfn| gfn != Gfn(5) && gfn != Gfn(0));
        let chosen: Vec<(u64, Work)> =
            chosen.map(|(frames, cost)| (frames.start.0, cost.work)).collect();
        let (rests, recent) = (Work::Rests, Work::Recent);
        assert_eq!(chosen, [(4, rests), (6, rests), (1, recent), (2, recent)]);
    }
}
