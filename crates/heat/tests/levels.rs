//! The queue against a naive model that steps every page in every window, and against what a page
//! was really used for.

use ebb_heat::{Access, Levels, Observer, Sorted, TOP_LEVEL, Uses, Verdict, Weights};
use ebb_units::{FrameRange, Gfn};
use proptest::prelude::*;

const PAGES: usize = 12;
/// Pages in a table. The entry above the table says whether it is read.
const TABLE: usize = 4;

/// What a page is doing, in the paper's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Its bit is clear: the look at the end of the next window judges it.
    Judged,
    /// It is not disturbed for this many more windows.
    AtRest(u32),
    /// Its rest is over, but its table was not read: its bit is from before.
    Overdue,
}

#[derive(Clone, Copy, Debug)]
struct Model {
    level: u32,
    step: u32,
    phase: Phase,
    uses: [u32; 2],
    wrote: usize,
}

impl Model {
    const NEW: Model = Model { level: 0, step: 0, phase: Phase::Judged, uses: [0; 2], wrote: 0 };

    fn begin(&mut self) {
        (self.phase, self.uses, self.step) = (Phase::Judged, [0; 2], 0);
    }

    fn sink(&mut self) {
        self.level = self.level.saturating_sub(1);
        self.step = self.step.saturating_sub(1);
    }

    /// Ends a window. `bit`: the bit is set; `seen`: the table is read. Returns whether the bit is
    /// cleared.
    fn window(&mut self, bit: Option<usize>, seen: bool, top: u32) -> bool {
        match (self.phase, bit.filter(|_| seen)) {
            (Phase::AtRest(left), bit) => {
                self.uses[self.wrote] += 1;
                self.phase = match (left, bit) {
                    (1, Some(_)) => Phase::Judged,
                    (1, None) => Phase::Overdue,
                    _ => Phase::AtRest(left - 1),
                };
                left == 1 && bit.is_some()
            }
            (Phase::Overdue, bit) => {
                self.sink();
                if bit.is_some() {
                    self.phase = Phase::Judged;
                }
                bit.is_some()
            }
            (Phase::Judged, None) => {
                self.sink();
                false
            }
            (Phase::Judged, Some(wrote)) => {
                self.uses[wrote] += 1;
                self.level = top.min(self.level + 1);
                self.step = top.min(self.step + 1);
                self.wrote = wrote;
                if self.step > 0 {
                    self.phase = Phase::AtRest(1 << (self.step - 1));
                }
                self.step == 0
            }
        }
    }
}

/// A guest's bits, with the queue and the model.
struct Bench {
    levels: Levels,
    models: [Model; PAGES],
    /// Whether accessed, and whether written.
    bits: [Option<usize>; PAGES],
    table_bits: [bool; PAGES / TABLE],
    top: u32,
}

impl Bench {
    fn new(top: u8) -> Bench {
        let ram = [FrameRange::new(Gfn(1), 5), FrameRange::new(Gfn(100), PAGES as u64 - 5)];
        Bench {
            levels: Levels::new(&ram, top),
            models: [Model::NEW; PAGES],
            bits: [None; PAGES],
            table_bits: [false; PAGES / TABLE],
            top: top.into(),
        }
    }

    fn gfn(page: usize) -> Gfn {
        Gfn(if page < 5 { 1 + page as u64 } else { 95 + page as u64 })
    }

    fn touch(&mut self, page: usize, write: bool) {
        self.bits[page] = Some(usize::from(write).max(self.bits[page].unwrap_or(0)));
        self.table_bits[page / TABLE] = true;
    }

    /// The round that clears all bits.
    fn begin(&mut self) {
        self.levels.begin();
        for page in 0..PAGES {
            self.models[page].begin();
            if self.bits[page].is_some() {
                let frames = FrameRange::new(Bench::gfn(page), 1);
                assert!(self.levels.would_clear(frames));
                assert_eq!(self.levels.saw(frames, Access::Read), Verdict::Clear);
            }
        }
        (self.bits, self.table_bits) = ([None; PAGES], [false; PAGES / TABLE]);
    }

    fn window(&mut self) {
        self.levels.next_window();
        let seen = std::mem::take(&mut self.table_bits);
        for page in 0..PAGES {
            let (bit, seen) = (self.bits[page], seen[page / TABLE]);
            let cleared = self.models[page].window(bit, seen, self.top);
            if let (Some(wrote), true) = (bit, seen) {
                let frames = FrameRange::new(Bench::gfn(page), 1);
                let would = self.levels.would_clear(frames);
                let access = if wrote == 1 { Access::Write } else { Access::Read };
                let verdict = self.levels.saw(frames, access);
                assert_eq!(verdict == Verdict::Clear, cleared, "page {page}");
                assert_eq!(would, cleared);
                // Another entry maps it and is seen in the same round.
                assert_eq!(self.levels.saw(frames, access), verdict);
            }
            if cleared {
                self.bits[page] = None;
            }
        }
    }

    fn check(&self) {
        for (page, model) in self.models.iter().enumerate() {
            let uses = self.levels.uses(Bench::gfn(page));
            let expected = Uses { reads: model.uses[0] as u8, writes: model.uses[1] as u8 };
            assert_eq!(uses, expected, "page {page}: {model:?}");
            let level = u32::from(self.levels.level(Bench::gfn(page)));
            assert_eq!(level, model.level, "page {page}: {model:?}");
        }
    }
}

/// For each window: the pages used, and how.
fn windows() -> impl Strategy<Value = Vec<Vec<(usize, bool)>>> {
    prop::collection::vec(prop::collection::vec((0..PAGES, any::<bool>()), 0..6), 1..40)
}

proptest! {
    #[test]
    fn the_queue_is_its_model(
        top in prop::sample::select(vec![0, 1, 3, TOP_LEVEL]),
        monitorings in prop::collection::vec(windows(), 1..4),
    ) {
        let mut bench = Bench::new(top);
        for windows in monitorings {
            bench.begin();
            for touches in windows {
                touches.into_iter().for_each(|(page, write)| bench.touch(page, write));
                bench.window();
                bench.check();
            }
        }
    }

    /// Without a queue the counts are exact, whatever is pruned.
    #[test]
    fn without_a_queue_counts_are_the_truth(windows in windows()) {
        let mut bench = Bench::new(0);
        let mut truth = [[0u32; 2]; PAGES];
        bench.begin();
        for touches in windows {
            let mut used = [None; PAGES];
            for (page, write) in touches {
                bench.touch(page, write);
                used[page] = Some(used[page].unwrap_or(false) | write);
            }
            for (page, write) in used.into_iter().enumerate() {
                if let Some(write) = write {
                    truth[page][usize::from(write)] += 1;
                }
            }
            bench.window();
        }
        for (page, [reads, writes]) in truth.into_iter().enumerate() {
            let uses = bench.levels.uses(Bench::gfn(page));
            prop_assert_eq!(uses, Uses { reads: reads as u8, writes: writes as u8 });
        }
    }

    /// The sort gives the order of degrees of a stable sort, and has every page once.
    #[test]
    fn sorting_is_sorting(windows in windows(), weights in (1u32..9, 1u32..9)) {
        let mut bench = Bench::new(TOP_LEVEL);
        bench.begin();
        for touches in windows {
            touches.into_iter().for_each(|(page, write)| bench.touch(page, write));
            bench.window();
        }
        let weights = Weights::new(weights.0, weights.1).unwrap();
        check_sorted(&bench.levels, weights)?;
    }

    /// The same, with buckets of more than one chunk.
    #[test]
    fn sorting_many(pages in prop::collection::vec(0u8..4, 0..3000), write in any::<bool>()) {
        let frames = FrameRange::new(Gfn(7), pages.len() as u64);
        let mut levels = Levels::new(&[frames], 0);
        levels.begin();
        for window in 1..4 {
            levels.next_window();
            for (gfn, &uses) in (7..).zip(&pages) {
                if uses >= window {
                    let access = if write { Access::Write } else { Access::Read };
                    levels.saw(FrameRange::new(Gfn(gfn), 1), access);
                }
            }
        }
        check_sorted(&levels, Weights::new(2, 3).unwrap())?;
    }
}

fn check_sorted(levels: &Levels, weights: Weights) -> Result<(), TestCaseError> {
    let mut naive: Vec<(Gfn, u64)> =
        levels.all_uses().map(|(gfn, uses)| (gfn, weights.degree(uses))).collect();
    naive.sort_by_key(|(_, degree)| *degree);
    let unused = naive.iter().take_while(|(_, degree)| *degree == 0).count();
    let sorted = Sorted::new(levels, weights);
    let used = naive.split_off(unused);
    prop_assert_eq!(sorted.used_frames(), used.len() as u64);
    let found: Vec<(Gfn, u64)> = sorted.coldest_first().collect();
    let degrees = |pages: &[(Gfn, u64)]| pages.iter().map(|page| page.1).collect::<Vec<_>>();
    prop_assert_eq!(degrees(&found), degrees(&used));
    let as_set = |mut pages: Vec<(Gfn, u64)>| {
        pages.sort_unstable();
        pages
    };
    prop_assert_eq!(as_set(found.clone()), as_set(used.clone()));
    let mut counts: Vec<(u64, u64)> = Vec::new();
    for &(_, degree) in &used {
        match counts.last_mut() {
            Some((last, count)) if *last == degree => *count += 1,
            _ => counts.push((degree, 1)),
        }
    }
    prop_assert_eq!(sorted.degrees().collect::<Vec<_>>(), counts);
    // Among pages of one degree, the level decides.
    let ranks: Vec<(u64, u8)> =
        found.iter().map(|&(gfn, degree)| (degree, levels.level(gfn))).collect();
    prop_assert!(ranks.is_sorted(), "{ranks:?}");
    let mut hottest: Vec<u64> = sorted.hottest_first().map(|page| page.1).collect();
    hottest.reverse();
    prop_assert_eq!(hottest, degrees(&used));
    for cut in [0, 1, used.len() / 2, used.len() + 5] {
        let hot: Vec<Gfn> = sorted.hottest_first().take(cut).map(|page| page.0).collect();
        prop_assert_eq!(hot.len(), cut.min(used.len()));
        // No page outside the hot set is hotter than one inside.
        let degree = |gfn: &Gfn| weights.degree(levels.uses(*gfn));
        let coldest_in = hot.iter().map(degree).min();
        let hottest_out =
            used.iter().filter(|page| !hot.contains(&page.0)).map(|page| page.1).max();
        prop_assert!(coldest_in.zip(hottest_out).is_none_or(|(inside, out)| inside >= out));
    }
    let warm = used.iter().filter(|page| page.1 >= 3).count() as u64;
    prop_assert_eq!(sorted.wanted_frames(80, 3), (warm * 80).div_ceil(100));
    Ok(())
}
