//! Sorting pages by how hot they are.

use std::hint::black_box;
use std::time::Instant;

use ebb_heat::{Access, Levels, Observer, Sorted, TOP_LEVEL, Uses, Weights};
use ebb_units::{FrameRange, Gfn};

use crate::bench::report::Report;
use crate::bench::rounds::{Rounds, us};
use crate::bench::row::Row;
use crate::bench::session::Session;

const PAGES: u64 = 1 << 20;
const WINDOWS: u64 = 8;
/// Goal: the sort takes at most this many plain passes.
const LIMIT: f64 = 3.0;

/// Runs the benchmark.
///
/// # Errors
/// None.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("vtmm-sort");
    report.note(format!(
        "{PAGES} pages after {WINDOWS} windows. The plain pass reads each page's counts, weights \
         them and writes the degree to an array; the sort leaves all used pages in order."
    ));
    let weights = Weights::new(1, 3)?;
    for (name, hot_percent, warm_percent) in
        [("a fifth hot, the rest never used", 20, 0), ("all used, some more", 20, 100)]
    {
        let levels = used(hot_percent, warm_percent);
        let (mut sort, mut plain, mut read) =
            (Rounds::default(), Rounds::default(), Rounds::default());
        for round in 0..=if quick { 10 } else { 50 } {
            let times = [
                timed(|| drop(black_box(Sorted::new(&levels, weights)))),
                timed(|| drop(black_box(degrees(&levels, weights)))),
                timed(|| _ = black_box(sum(&levels, weights))),
            ];
            // The first round warms up.
            if round > 0 {
                [&mut sort, &mut plain, &mut read]
                    .into_iter()
                    .zip(times)
                    .for_each(|(r, t)| r.push(t));
            }
        }
        let row = || Row::new(name, "us", &sort);
        report.row(row().against("pass that writes the degrees", &plain).at_most(LIMIT));
        report.row(row().against("pass that adds them up", &read));
    }
    let levels = used(20, 0);
    let bytes = |bytes: u64| [bytes as f64 / PAGES as f64].into_iter().collect::<Rounds>();
    let row = Row::new("queue, a page", "bytes", &bytes(levels.bytes()));
    report.row(row.exact().no_more_than(8.0));
    let all = used(100, 0);
    let sorted = Sorted::new(&all, weights);
    let row = Row::new(
        "queue and all pages sorted, a page",
        "bytes",
        &bytes(all.bytes() + sorted.bytes()),
    );
    report.row(row.exact().no_more_than(8.0));
    Ok(report)
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    us(start.elapsed())
}

fn degrees(levels: &Levels, weights: Weights) -> Vec<u64> {
    levels.all_uses().map(|(_, uses)| weights.degree(uses)).collect()
}

fn sum(levels: &Levels, weights: Weights) -> u64 {
    levels.all_uses().map(|(_, uses): (Gfn, Uses)| weights.degree(uses)).sum()
}

/// Makes pages of which `hot_percent` are used in every window, and `warm_percent` of the others
/// now and then. They are scattered, and partly written.
fn used(hot_percent: u64, warm_percent: u64) -> Levels {
    let mut levels = Levels::new(&[FrameRange::new(Gfn(0), PAGES)], TOP_LEVEL);
    levels.begin();
    for window in 1..=WINDOWS {
        levels.next_window();
        for gfn in 0..PAGES {
            let random = gfn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            let is_hot = random % 100 < hot_percent;
            let is_warm = random / 100 % 100 < warm_percent && (random >> 16) % WINDOWS < window;
            if is_hot || is_warm {
                let access = if random % 3 == 0 { Access::Write } else { Access::Read };
                levels.saw(FrameRange::new(Gfn(gfn), 1), access);
            }
        }
    }
    levels
}
