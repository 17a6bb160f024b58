//! What to move between a VM's tiers: the hottest pages of slow tiers against the coldest of fast
//! ones (vTMM, section 3.3.2), as far as that pays and the budget lasts.

use std::cmp::Ordering;

use ebb_units::Gfn;

/// A page, and how hot it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heat {
    /// The page.
    pub gfn: Gfn,
    /// Its page-degree: weighted reads and writes of one monitoring (vTMM, section 3.3.1).
    pub degree: u32,
}

/// Where a page is now. A tier is named by its number on the ladder; 0 is the fastest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PagePlace {
    /// In this tier.
    Tier(u8),
    /// In this tier, and in use by an I/O: it waits for the next plan.
    Busy(u8),
    /// In no tier: it holds nothing that could be moved.
    Nowhere,
}

/// The rules that a plan keeps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Frames of this VM that each tier may hold, fastest tier first. Only the first 256 count.
    pub capacity_frames: Vec<u64>,
    /// By how much hotter a page must be to take another's place; at least 1. Without a margin,
    /// pages of about the same degree would change places for ever.
    pub margin_degrees: u32,
    /// How hot a page must be to take a free place; at least 1.
    pub free_degrees: u32,
    /// Most pages to move, including those that make room: what the bandwidth allows until the next
    /// plan.
    pub budget_frames: u64,
}

/// The move of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// The page.
    pub gfn: Gfn,
    /// The tier that it leaves.
    pub from: u8,
    /// The tier that it goes to.
    pub to: u8,
}

/// Moves that are made together: `down` first, which makes room for `up`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// A move to a slower tier.
    pub down: Option<Move>,
    /// A move to a faster tier.
    pub up: Option<Move>,
}

/// What to do, most important first. No page is in it twice. At the end of any step no tier holds
/// more than it may, unless it did before.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// The steps, in this order.
    pub steps: Vec<Step>,
    /// Pages that were passed over because of an I/O.
    pub waiting_frames: u64,
    /// Whether the budget was used up, with more left to do.
    pub is_cut: bool,
}

impl Plan {
    /// Number of pages that it moves.
    pub fn frames(&self) -> u64 {
        self.steps.iter().map(|step| step.frames()).sum()
    }
}

impl Step {
    /// Number of pages that it moves: 1 or 2.
    pub fn frames(&self) -> u64 {
        u64::from(self.down.is_some()) + u64::from(self.up.is_some())
    }
}

/// Plans for the pages of a VM in `order`: by degree, coldest first. Each page is asked for its
/// place once. Pages that are not in `order` stay where they are, and do not count.
///
/// Works from the fastest tier down. If a tier holds too much, its coldest pages go to the next
/// tier with room. Free room goes to the hottest pages from below. Then pages change places in
/// pairs. The time is in proportion to the number of pages, for each tier.
pub fn plan(order: &[Heat], place: impl FnMut(Gfn) -> PagePlace, rules: &Rules) -> Plan {
    let mut planner = Planner::new(order, place, rules);
    for tier in 0..planner.used_frames.len().saturating_sub(1) {
        planner.settle(tier as u8);
    }
    planner.plan
}

struct Planner<'a> {
    order: &'a [Heat],
    /// The place of each page in `order`. A page that moves is nowhere from then on.
    places: Vec<PagePlace>,
    used_frames: Vec<u64>,
    rules: &'a Rules,
    left_frames: u64,
    plan: Plan,
}

/// Where the search for a tier's pages continues.
struct Ends {
    cold: usize,
    /// One above the index to look at next.
    hot: usize,
}

/// A page that may move.
#[derive(Clone, Copy)]
struct Candidate {
    index: usize,
    heat: Heat,
    tier: u8,
}

impl Candidate {
    fn to(self, to: u8) -> Option<(usize, Move)> {
        Some((self.index, Move { gfn: self.heat.gfn, from: self.tier, to }))
    }
}

/// The move down and the move up of a step that pays.
type Found = [Option<(usize, Move)>; 2];

impl<'a> Planner<'a> {
    fn new(order: &'a [Heat], mut place: impl FnMut(Gfn) -> PagePlace, rules: &'a Rules) -> Self {
        let mut used_frames = vec![0; rules.capacity_frames.len().min(256)];
        let known = |heat: &Heat| {
            let place = place(heat.gfn);
            let (PagePlace::Tier(tier) | PagePlace::Busy(tier)) = place else { return place };
            let Some(used) = used_frames.get_mut(usize::from(tier)) else {
                return PagePlace::Nowhere;
            };
            *used += 1;
            place
        };
        let places: Vec<PagePlace> = order.iter().map(known).collect();
        let (plan, left_frames) = (Plan::default(), rules.budget_frames);
        Planner { order, places, used_frames, rules, left_frames, plan }
    }

    /// Gives one tier what it should have from below.
    fn settle(&mut self, tier: u8) {
        let mut ends = Ends { cold: 0, hot: self.order.len() };
        loop {
            let found = match self.used(tier).cmp(&self.capacity(tier)) {
                Ordering::Less => self.promote(tier, &mut ends),
                Ordering::Equal => self.exchange(tier, &mut ends),
                Ordering::Greater => {
                    self.relieve(tier, &mut ends).or_else(|| self.exchange(tier, &mut ends))
                }
            };
            let Some(found) = found else { return };
            if !self.take(found) {
                self.plan.is_cut = true;
                return;
            }
        }
    }

    fn relieve(&mut self, tier: u8, ends: &mut Ends) -> Option<Found> {
        let mut lower = (tier.saturating_add(1)..=u8::MAX).take(self.used_frames.len());
        let to = lower.find(|&tier| self.used(tier) < self.capacity(tier))?;
        Some([self.coldest(tier, ends)?.to(to), None])
    }

    fn promote(&mut self, tier: u8, ends: &mut Ends) -> Option<Found> {
        let up = self.hottest_below(tier, ends)?;
        (up.heat.degree >= self.rules.free_degrees.max(1)).then_some([None, up.to(tier)])
    }

    fn exchange(&mut self, tier: u8, ends: &mut Ends) -> Option<Found> {
        let up = self.hottest_below(tier, ends)?;
        let down = self.coldest(tier, ends)?;
        let margin = self.rules.margin_degrees.max(1);
        let pays = up.heat.degree >= down.heat.degree.saturating_add(margin);
        pays.then_some([down.to(up.tier), up.to(tier)])
    }

    /// Takes a step into the plan. `false`: the budget does not suffice.
    fn take(&mut self, found: Found) -> bool {
        let [down, up] = found.map(|page| page.map(|(_, moved)| moved));
        let step = Step { down, up };
        let Some(left) = self.left_frames.checked_sub(step.frames()) else { return false };
        self.left_frames = left;
        for (index, moved) in found.into_iter().flatten() {
            self.places.get_mut(index).into_iter().for_each(|place| *place = PagePlace::Nowhere);
            self.count(moved.from, |used| used.saturating_sub(1));
            self.count(moved.to, |used| used + 1);
        }
        self.plan.steps.push(step);
        true
    }

    /// The coldest remaining page of a tier.
    fn coldest(&mut self, tier: u8, ends: &mut Ends) -> Option<Candidate> {
        while ends.cold < self.places.len() {
            if let Some(found) = self.look(ends.cold, |here| here == tier) {
                return Some(found);
            }
            ends.cold += 1;
        }
        None
    }

    /// The hottest remaining page of all tiers below one.
    fn hottest_below(&mut self, tier: u8, ends: &mut Ends) -> Option<Candidate> {
        while let Some(index) = ends.hot.checked_sub(1) {
            if let Some(found) = self.look(index, |here| here > tier) {
                return Some(found);
            }
            ends.hot = index;
        }
        None
    }

    /// The page at this index, if it is in a wanted tier. A page in use is counted and passed over.
    fn look(&mut self, index: usize, wanted: impl Fn(u8) -> bool) -> Option<Candidate> {
        let place = self.places.get_mut(index)?;
        match *place {
            PagePlace::Tier(tier) if wanted(tier) => {
                Some(Candidate { index, heat: *self.order.get(index)?, tier })
            }
            PagePlace::Busy(tier) if wanted(tier) => {
                *place = PagePlace::Nowhere;
                self.plan.waiting_frames += 1;
                None
            }
            _ => None,
        }
    }

    fn used(&self, tier: u8) -> u64 {
        self.used_frames.get(usize::from(tier)).copied().unwrap_or(0)
    }

    fn capacity(&self, tier: u8) -> u64 {
        self.rules.capacity_frames.get(usize::from(tier)).copied().unwrap_or(0)
    }

    fn count(&mut self, tier: u8, change: impl FnOnce(u64) -> u64) {
        if let Some(used) = self.used_frames.get_mut(usize::from(tier)) {
            *used = change(*used);
        }
    }
}
