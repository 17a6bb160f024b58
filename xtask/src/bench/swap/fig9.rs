//! Figure 9: a file of 200 MB is read again and again by a guest that has 100 MB and
//! believes to have 512.

use std::path::Path;

use vmtest::Scratch;

use super::medium::Medium;
use super::rig::{self, Both, Keeper, Rig, Setup};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

pub const MEMORY_MIB: u64 = 512;
pub const LIMIT_MIB: u64 = 100;
const IMAGE_BYTES: u64 = 400 << 20;

/// Of the better baseline's time: 6 times faster, and 1.5 times.
const fn goal(medium: Medium) -> f64 {
    match medium {
        Medium::Hdd => 0.166,
        Medium::Ssd => 0.666,
    }
}

/// One reading of the file.
#[derive(Clone, Copy)]
struct Iteration {
    seconds: f64,
    traffic: Both,
}

/// One VM from its boot to its end.
struct Run {
    keeper: Keeper,
    iterations: Vec<Iteration>,
    peak_mib: u64,
}

/// Runs it.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("vswapper-fig9");
    let directory = Scratch::new("ebb-bench-")?;
    let image = rig::image(directory.path(), IMAGE_BYTES, |at| {
        work::random_file(&at.join("file"), work::FILE_BYTES)
    })?;
    let (count, keepers): (_, &[Keeper]) = match quick {
        true => (4, &[Keeper::Anonymous, Keeper::Ebb]),
        false => (8, &[Keeper::Nobody, Keeper::Anonymous, Keeper::Memfd, Keeper::Ebb]),
    };
    let mut panels = Vec::new();
    for medium in [Medium::Ssd, Medium::Hdd] {
        let mut runs = Vec::new();
        for &keeper in keepers {
            match work::again_if_killed(|| one(keeper, medium, &image, count)) {
                Ok(run) => runs.push(run),
                Err(why) => report.note(format!("{}, {}: {why}", medium.name(), keeper.name())),
            }
        }
        rows(&mut report, medium, &runs);
        panels.extend(pictures(medium, &runs));
    }
    let title = "Reading 200 MB again and again with 100 MB of 512 (VSwapper, fig. 9)";
    report.plot(&Figure { title, x_label: "iteration", y_label: "", panels: &panels })?;
    Ok(report)
}

fn one(keeper: Keeper, medium: Medium, image: &Path, count: usize) -> anyhow::Result<Run> {
    let setup = Setup::new(keeper, medium, [MEMORY_MIB, LIMIT_MIB], image);
    let rig = Rig::start(&setup)?;
    let mut run = Run { keeper, iterations: Vec::new(), peak_mib: 0 };
    for _ in 0..count {
        let before = rig.traffic()?;
        let seconds = work::seconds(&rig.vm, "read /mnt/file")?;
        run.iterations.push(Iteration { seconds, traffic: rig.traffic()? - before });
    }
    run.peak_mib = rig.peak_mib()?;
    Ok(run)
}

impl Run {
    fn later(&self, figure: impl Fn(&Iteration) -> f64) -> Rounds {
        self.iterations.iter().skip(1).map(figure).collect()
    }

    fn first(&self, figure: impl Fn(&Iteration) -> f64) -> Rounds {
        self.iterations.iter().take(1).map(figure).collect()
    }
}

fn requests(iteration: &Iteration) -> f64 {
    (iteration.traffic.disk.read_requests + iteration.traffic.swap.read_requests) as f64
}

fn pages_in(iteration: &Iteration) -> f64 {
    (iteration.traffic.disk.read_pages + iteration.traffic.swap.read_pages) as f64
}

fn pages_out(iteration: &Iteration) -> f64 {
    iteration.traffic.swap.write_pages as f64
}

fn rows(report: &mut Report, medium: Medium, runs: &[Run]) {
    let Some(ebb) = runs.iter().find(|run| run.keeper == Keeper::Ebb) else { return };
    let mut others: Vec<&Run> = runs.iter().filter(|run| run.keeper != Keeper::Ebb).collect();
    let speed = |run: &&Run| (run.keeper == Keeper::Nobody, run.later(|i| i.seconds).median());
    // The better baseline first; without a limit is none.
    others.sort_by(|a, b| speed(a).partial_cmp(&speed(b)).unwrap_or(std::cmp::Ordering::Equal));
    let what = |what: &str| format!("{}: {what}", medium.name());
    for (place, other) in others.into_iter().enumerate() {
        let against = other.keeper.name();
        let row = |label: &str, unit, of: fn(&Iteration) -> f64| {
            let ebb = ebb.later(of);
            Row::new(what(label), unit, &ebb).against(against, &other.later(of))
        };
        let time = row("an iteration, from the second on", "s", |i| i.seconds);
        report.row(if place == 0 { time.at_most(goal(medium)) } else { time });
        if other.keeper == Keeper::Nobody {
            continue;
        }
        let first = Row::new(what("the first iteration"), "s", &ebb.first(|i| i.seconds));
        report.row(first.against(against, &other.first(|i| i.seconds)));
        report.row(row("requests in, an iteration", "", requests));
        report.row(row("pages in, an iteration", "", pages_in));
        report.row(row("pages swapped out, an iteration", "", pages_out));
    }
    let out = ebb.later(pages_out);
    report.row(Row::new(what("pages swapped out, an iteration"), "", &out).no_more_than(0.0));
    let last: Rounds = ebb.iterations.iter().rev().take(1).map(requests).collect();
    let second: Rounds = ebb.iterations.iter().skip(1).take(1).map(requests).collect();
    let flat = Row::new(what("requests in, the last iteration"), "", &last);
    report.row(flat.against("the second", &second).at_most(1.1));
    for run in runs {
        report.note(format!(
            "{}, {}: QEMU and what serves it took {} MiB at most.",
            medium.name(),
            run.keeper.name(),
            run.peak_mib
        ));
    }
}

fn pictures(medium: Medium, runs: &[Run]) -> Vec<Panel> {
    let panel = |label: &str, of: fn(&Iteration) -> f64| Panel {
        title: format!("{}: {label}", medium.name()),
        y_label: Some(label.into()),
        series: runs.iter().map(|run| series(run, of)).collect(),
        ..Panel::default()
    };
    vec![
        panel("seconds an iteration", |i| i.seconds),
        panel("requests in", requests),
        panel("pages swapped out", pages_out),
    ]
}

fn series(run: &Run, of: fn(&Iteration) -> f64) -> Series {
    let points = (1..).zip(&run.iterations).map(|(x, iteration)| (f64::from(x), of(iteration)));
    Series { name: run.keeper.name().into(), points: points.collect(), is_bound: false }
}
