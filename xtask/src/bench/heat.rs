//! Finding hot memory: what a window looks at in a real guest's page tables, and sorting.

// A VM held by this process, as the tests of the tracker have it.
#[path = "../../../vmtest/tests/tracked/mod.rs"]
mod tracked;

use std::hint::black_box;
use std::time::Instant;

use ebb_heat::{Access, Levels, Observer, Round, Sorted, TOP_LEVEL, Uses, Walk, Weights};
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, HUGE_BYTES};
use tracked::Tracked;
use vmtest::{Guest, Host, Vm};

use super::report::{Report, Row};
use super::rounds::{Rounds, us};
use crate::plot::{Figure, Panel, Series};

const PAGES: u64 = 1 << 20;
const WINDOWS: u64 = 8;
/// The sort may take so many plain passes.
const LIMIT: f64 = 3.0;

/// Runs it.
///
/// # Errors
/// None.
pub fn sort(quick: bool) -> anyhow::Result<Report> {
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
            // The first warms up.
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
    report.row(row.no_more_than(8.0));
    let all = used(100, 0);
    let sorted = Sorted::new(&all, weights);
    let row = Row::new(
        "queue and all pages sorted, a page",
        "bytes",
        &bytes(all.bytes() + sorted.bytes()),
    );
    report.row(row.no_more_than(8.0));
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

/// Pages of which so many are used in every window, and so many of the others now and then;
/// scattered, and partly written.
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

/// What a program has, and what it uses of it: of so many units of 2 MiB one.
const PROGRAM: &str = "400M";
const PARTS: [u64; 4] = [10, 5, 2, 1];
/// Mapped, and not used.
const COLD: &str = "800M";

/// How much mapped memory a window looks at, by how much of it is used: past what is not
/// used, and all of it (vTMM, figure 2 [a]).
///
/// # Errors
/// A VM cannot be held here.
pub fn fig2(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("vtmm-fig2");
    report.note(format!(
        "A guest of 2 GiB with 4 KiB pages under TCG; {COLD} are mapped and not used, and of \
         {PROGRAM} a part is used again and again, in units of 2 MiB. Looked at is what the page \
         tables that were read can map."
    ));
    let guest = Guest::debian("6.1-cloud").memory("2G").append("pti=on transparent_hugepage=never");
    let vm = Host::new().qemu(guest);
    let tracked = Tracked::take(&vm);
    vm.guest(&format!("fill cold {COLD}"));
    let windows = if quick { 4 } else { 16 };
    let mut curves = [Vec::new(), Vec::new()];
    for part in PARTS {
        vm.guest(&format!("hot h {PROGRAM} {FRAMES_PER_HUGE} {part}"));
        let [pruned, full] = windows_of(&vm, &tracked, windows);
        vm.guest("hotstop h");
        let percent = 100.0 / part as f64;
        let row = |what: &str, unit, rounds| {
            Row::new(format!("{percent:.0} % used: {what}"), unit, rounds)
        };
        report
            .row(row("looked at", "MiB", &pruned.looked_at).against("all tables", &full.looked_at));
        report.row(row("a window", "us", &pruned.time).against("all tables", &full.time));
        report.row(
            row("metadata held, a window", "frames", &pruned.held).against("no queue", &full.held),
        );
        for (curve, figures) in curves.iter_mut().zip([&pruned, &full]) {
            curve.push((percent, figures.looked_at.median()));
        }
    }
    let [pruned, full] = curves;
    let series = |name: &str, points| Series { name: name.into(), points, is_bound: false };
    let panel = Panel {
        series: vec![series("past what is not used", pruned), series("all tables", full)],
        ..Panel::default()
    };
    report.plot(&Figure {
        title: "Memory looked at in a window",
        x_label: "used of the program's memory [%]",
        y_label: "looked at [MiB]",
        panels: &[panel],
    })?;
    Ok(report)
}

/// What windows took.
#[derive(Default)]
struct Windows {
    looked_at: Rounds,
    time: Rounds,
    held: Rounds,
}

/// With the queue past what is not used; and each window everything, without a queue.
fn windows_of(vm: &Vm, tracked: &Tracked, count: u32) -> [Windows; 2] {
    [(TOP_LEVEL, Walk::Pruned), (0, Walk::Full)].map(|(top_level, walk)| {
        let (mut levels, mut windows) = (tracked.levels(top_level), Windows::default());
        levels.begin();
        tracked.round(Walk::Full, &mut levels);
        for _ in 0..count {
            vm.guest("hoton h 3");
            levels.next_window();
            let mut round = Round::default();
            windows.time.push(timed(|| round = tracked.round(walk, &mut levels)));
            windows.looked_at.push(round.tables as f64 * HUGE_BYTES as f64 / f64::from(1 << 20));
            windows.held.push(round.held_frames as f64);
        }
        windows
    })
}
