//! What of the frames that were looked at is to go.

use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::cost::{Cost, Work};

/// Candidates, in the order in which they were found.
pub(crate) struct Choice {
    /// Frames that go whole, so many.
    unit: u64,
    want: usize,
    candidates: Vec<Candidate>,
    rest: usize,
}

struct Candidate {
    cost: Cost,
    frames: FrameRange,
    may_go: bool,
}

impl Choice {
    /// Of about `want` frames.
    pub(crate) fn new(unit: u64, want: usize) -> Choice {
        Choice { unit, want, candidates: Vec::new(), rest: 0 }
    }

    /// Whether as many were found that nobody misses soon, and that may go.
    pub(crate) fn is_full(&self) -> bool {
        self.rest >= self.want
    }

    /// A unit that begins with this frame. Whether it may go is asked here only where it counts.
    pub(crate) fn add(&mut self, first: Gfn, cost: Cost, may_go: impl Fn(Gfn) -> bool) {
        let frames = FrameRange::new(first, self.unit);
        let counts = cost.work == Work::Rests && !self.is_full();
        if counts && !frames.frames().all(may_go) {
            return;
        }
        self.rest += if counts { self.unit as usize } else { 0 };
        self.candidates.push(Candidate { cost, frames, may_go: counts });
    }

    /// Those units that may go and cost least.
    pub(crate) fn cheapest(
        mut self,
        may_go: impl Fn(Gfn) -> bool,
    ) -> impl Iterator<Item = (FrameRange, Cost)> {
        // Stable: of those that cost the same the first one found.
        self.candidates.sort_by_key(|candidate| candidate.cost);
        let may_go = move |it: &Candidate| it.may_go || it.frames.frames().all(&may_go);
        let units = self.candidates.into_iter().filter(may_go);
        units.map(|it| (it.frames, it.cost)).take(self.want.div_ceil(self.unit as usize))
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
    use std::cell::Cell;

    use ebb_inspect::PageKind::{Anonymous, File};

    use super::*;
    use crate::cost::Page;
    use crate::uses::Uses;

    fn cost(kind: ebb_inspect::PageKind, uses: Uses) -> Cost {
        Page { kind: Some(kind), ..Page::default() }.cost(uses).unwrap()
    }

    #[test]
    fn the_cheapest_that_may_go_are_chosen() {
        let may_go = |gfn| gfn != Gfn(5) && gfn != Gfn(0);
        let mut choice = Choice::new(1, 4);
        for gfn in 0..4 {
            choice.add(Gfn(gfn), cost(Anonymous, Uses::NOW), may_go);
        }
        (4..7).for_each(|gfn| choice.add(Gfn(gfn), cost(File, Uses::rests(1)), may_go));
        assert_eq!((choice.rest, choice.is_full()), (2, false));
        let chosen = choice.cheapest(may_go);
        let chosen: Vec<(u64, Work)> =
            chosen.map(|(frames, cost)| (frames.start.0, cost.work)).collect();
        let (rests, recent) = (Work::Rests, Work::Recent);
        assert_eq!(chosen, [(4, rests), (6, rests), (1, recent), (2, recent)]);
    }

    /// Not of each that is cheap whether it may go is asked.
    #[test]
    fn no_more_is_asked_than_counts() {
        let asked = Cell::new(0);
        let may_go = |_| {
            asked.set(asked.get() + 1);
            true
        };
        let mut choice = Choice::new(1, 4);
        (0..100).for_each(|gfn| choice.add(Gfn(gfn), cost(File, Uses::rests(1)), may_go));
        assert!(choice.is_full());
        assert_eq!((choice.cheapest(may_go).count(), asked.get()), (4, 4));
    }
}
