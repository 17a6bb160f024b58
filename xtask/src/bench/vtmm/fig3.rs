//! Figure 3: how often pages are found used, with the queue and without, and whether the pages
//! found hottest really are.

use ebb_heat::{Levels, Sorted, TOP_LEVEL, Weights};
use ebb_units::Gfn;

use super::rig::{HotSet, Rig, WINDOWS};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::plot::{Figure, Panel, Series};

const PROGRAM_MIB: u64 = 200;
/// Hot percent of the pages, as in the paper.
const HOT: u64 = 20;
/// Mean accesses to a page in a window. A page that is not hot gets a tenth of that.
const ACCESSES: [f64; 3] = [0.5, 1.0, 1.5];
/// Top levels: with the queue, and without it, where every window looks at every page.
const TOP_LEVELS: [u8; 2] = [TOP_LEVEL, 0];
const GOAL: f64 = 0.98;
/// Points of the picture.
const POINTS: usize = 200;

/// Runs the benchmark.
///
/// # Errors
/// Somebody interrupts.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("vtmm-fig3");
    report.note(format!(
        "A guest's program with {PROGRAM_MIB} MiB in 4 KiB pages under TCG: 90 % of its accesses \
         are of {HOT} % of the pages, scattered, the others of all. Windows end by the number of \
         accesses. Precision is of the hottest pages, as many as are hot, of all that the guest \
         has; recall counts hot pages that were found used in half of {WINDOWS} windows."
    ));
    let rig = Rig::start(PROGRAM_MIB, 2);
    for (place, accesses) in (0..).zip(ACCESSES) {
        let found = windows(&rig, accesses, place, if quick { 2 } else { 5 })?;
        let cold = accesses / 10.0;
        for (what, rounds) in [("precision", [0, 1]), ("recall", [2, 3])] {
            let [queue, none] = rounds.map(|at| &found[at]);
            let what = format!("{cold:.2} uses of a cold page a window: {what}");
            let row = Row::new(what, "", queue).against("no queue", none);
            report.row(row.not_less_than(GOAL));
        }
    }
    plot(&report, &rig, if quick { 40 } else { 100 })?;
    Ok(report)
}

/// Returns precision and recall, each with the queue and without, of some monitorings after a first
/// one.
fn windows(rig: &Rig, accesses: f64, place: u64, count: u32) -> anyhow::Result<[Rounds; 4]> {
    let mut found: [Rounds; 4] = Default::default();
    let accesses = (accesses * rig.pages() as f64) as u64;
    for (at, (number, top_level)) in (0..).zip(TOP_LEVELS).enumerate() {
        let mut levels = rig.tracked.levels(top_level);
        let hot = rig.hot_set(HOT, 2 * place + number);
        rig.heat(hot);
        rig.monitor(&mut levels, WINDOWS, accesses)?;
        for _ in 0..count {
            rig.monitor(&mut levels, WINDOWS, accesses)?;
            let (precision, recall) = judge(rig, &levels, hot);
            found[at].push(precision);
            found[at + 2].push(recall);
        }
    }
    Ok(found)
}

/// Returns precision and recall. Precision is the part of the pages found hottest that are hot,
/// with as many pages as are hot. Recall is the part of the hot pages that were counted as used in
/// half of the windows.
fn judge(rig: &Rig, levels: &Levels, hot: HotSet) -> (f64, f64) {
    let truth = rig.hot_frames(hot);
    let sorted = Sorted::new(levels, Weights::EVEN);
    let hottest = sorted.hottest_first().take(hot.count as usize);
    let found: Vec<Gfn> = hottest.map(|(gfn, _)| gfn).collect();
    let right = found.iter().filter(|gfn| truth.binary_search(gfn).is_ok()).count();
    let counted = truth.iter().filter(|gfn| windows_used(levels, **gfn) >= WINDOWS / 2).count();
    (right as f64 / found.len().max(1) as f64, counted as f64 / truth.len() as f64)
}

fn windows_used(levels: &Levels, gfn: Gfn) -> u8 {
    let uses = levels.uses(gfn);
    uses.reads + uses.writes
}

/// Draws in how many windows each page was used, most first.
fn plot(report: &Report, rig: &Rig, windows: u8) -> anyhow::Result<()> {
    let mut series = Vec::new();
    for (number, top_level) in (0..).zip(TOP_LEVELS) {
        rig.heat(rig.hot_set(HOT, number));
        let mut levels = rig.tracked.levels(top_level);
        rig.monitor(&mut levels, windows, rig.pages())?;
        let uses = |gfn: &Gfn| f64::from(windows_used(&levels, *gfn));
        let mut counts: Vec<f64> = rig.frames().iter().map(uses).collect();
        counts.sort_unstable_by(|a, b| b.total_cmp(a));
        let last = counts.len() - 1;
        let at = |point: usize| point * last / POINTS;
        let percent = |point: usize| 100.0 * point as f64 / POINTS as f64;
        series.push(Series {
            name: if top_level > 0 { "with the queue" } else { "without" }.into(),
            points: (0..=POINTS).map(|point| (percent(point), counts[at(point)])).collect(),
            is_bound: false,
        });
    }
    let title = "How often pages are found used (vTMM, fig. 3)";
    let (x_label, y_label) = ("pages, hottest first [%]", "windows");
    let panels = [Panel { title: format!("of {windows} windows"), series, ..Panel::default() }];
    report.plot(&Figure { title, x_label, y_label, panels: &panels })
}
