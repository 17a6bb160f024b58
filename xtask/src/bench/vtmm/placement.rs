//! Which pages of a VM are in fast memory, as plans move them.

use std::collections::{HashMap, HashSet};

use ebb_heat::{Access, Levels, Observer, Sorted, Uses, Verdict, Weights};
use ebb_tier::plan::plan;
use ebb_tier::{Heat, PagePlace, Rules};
use ebb_units::{FrameRange, Gfn};

use super::rig::HotSet;

/// Degree at which a page is hot for a policy with a fixed threshold: used in half of the windows.
const THRESHOLD: u64 = 4;
const FAST: u8 = 0;

/// Two tiers, of which the fast one has room for `room_frames` pages.
pub struct Placement {
    fast: HashSet<Gfn>,
    room_frames: u64,
}

impl Placement {
    /// Makes a placement with these pages in the fast tier.
    pub fn new(fast: &[Gfn]) -> Placement {
        Placement { fast: fast.iter().copied().collect(), room_frames: fast.len() as u64 }
    }

    /// Moves pages as a plan says. `order` is from coldest to hottest.
    pub fn follow(&mut self, order: &[Heat]) {
        let rules = Rules {
            capacity_frames: vec![self.room_frames, u64::MAX],
            margin_degrees: 1,
            free_degrees: 1,
            budget_frames: u64::MAX,
        };
        let place = |gfn| PagePlace::Tier(if self.fast.contains(&gfn) { FAST } else { FAST + 1 });
        let plan = plan(order, place, &rules);
        for moved in plan.steps.iter().flat_map(|step| [step.down, step.up]).flatten() {
            match moved.to {
                FAST => self.fast.insert(moved.gfn),
                _ => self.fast.remove(&moved.gfn),
            };
        }
    }

    /// Returns the share of accesses that the fast tier serves, relative to the best possible.
    /// `frames` are the program's, and `hot_frames` are its hot frames, in order.
    pub fn share_of_best(&self, frames: &[Gfn], hot: HotSet, hot_frames: &[Gfn]) -> f64 {
        let pages = frames.len() as u64;
        let held = frames.iter().filter(|gfn| self.fast.contains(gfn));
        let (hot_held, others): (Vec<&Gfn>, Vec<&Gfn>) =
            held.partition(|gfn| hot_frames.binary_search(gfn).is_ok());
        let most = hot.count.min(self.room_frames);
        let best = hot.share(most, self.room_frames - most, pages);
        hot.share(hot_held.len() as u64, others.len() as u64, pages) / best
    }
}

/// Returns these pages in the order of their degree.
pub fn by_degree(levels: &Levels, frames: &[Gfn]) -> Vec<Heat> {
    let wanted: HashSet<Gfn> = frames.iter().copied().collect();
    let sorted = Sorted::new(levels, Weights::EVEN);
    let used = sorted.coldest_first().filter(|(gfn, _)| wanted.contains(gfn));
    let used: Vec<Heat> = used.map(|(gfn, degree)| heat(gfn, degree)).collect();
    let is_used = |gfn: &Gfn| levels.uses(*gfn) != Uses::default();
    let unused = frames.iter().filter(|gfn| !is_used(gfn)).map(|&gfn| heat(gfn, 0));
    unused.chain(used).collect()
}

/// Returns these pages, those above the threshold behind the others.
pub fn by_threshold(levels: &Levels, frames: &[Gfn]) -> Vec<Heat> {
    let is_hot = |gfn: &Gfn| Weights::EVEN.degree(levels.uses(*gfn)) >= THRESHOLD;
    let (hot, cold): (Vec<Gfn>, Vec<Gfn>) = frames.iter().copied().partition(is_hot);
    let of = |frames: Vec<Gfn>, degree| frames.into_iter().map(move |gfn| heat(gfn, degree));
    of(cold, 0).chain(of(hot, 1)).collect()
}

fn heat(gfn: Gfn, degree: u64) -> Heat {
    Heat { gfn, degree: u32::try_from(degree).unwrap_or(u32::MAX) }
}

/// When each page was used last.
#[derive(Default)]
pub struct Recency {
    window: u64,
    counts: bool,
    last: HashMap<Gfn, u64>,
}

impl Recency {
    /// Begins a round: one at the end of a window, whose uses count, or one that clears.
    pub fn next(&mut self, counts: bool) {
        (self.window, self.counts) = (self.window + 1, counts);
    }

    /// Returns these pages, the least recently used first.
    pub fn order(&self, frames: &[Gfn]) -> Vec<Heat> {
        let last = |gfn: Gfn| self.last.get(&gfn).copied().unwrap_or(0);
        let mut order: Vec<Heat> = frames.iter().map(|&gfn| heat(gfn, last(gfn))).collect();
        order.sort_by_key(|heat| heat.degree);
        order
    }
}

impl Observer for Recency {
    fn would_clear(&self, _: FrameRange) -> bool {
        true
    }

    fn saw(&mut self, frames: FrameRange, _: Access) -> Verdict {
        if self.counts {
            self.last.extend(frames.frames().map(|gfn| (gfn, self.window)));
        }
        Verdict::Clear
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_placement_has_all_of_its_share() {
        let frames: Vec<Gfn> = (0..100).map(Gfn).collect();
        let hot = HotSet { first: 0, count: 20 };
        let truth = &frames[..20];
        let of = |fast: &[Gfn]| Placement::new(fast).share_of_best(&frames, hot, truth);
        assert_eq!(of(&frames[..50]), 1.0);
        // At best 95 % of the accesses are served, here 5 %: each of these 50 pages has 0.1 %.
        assert!((of(&frames[50..]) - 0.05 / 0.95).abs() < 1e-9);
        let mut placement = Placement::new(&frames[50..]);
        let order: Vec<Heat> = frames.iter().rev().map(|&gfn| heat(gfn, 100 - gfn.0)).collect();
        placement.follow(&order);
        assert_eq!(placement.share_of_best(&frames, hot, truth), 1.0);
    }
}
