//! Figures 10 and 11: guests that work again and again and rest in between. Three of them start one
//! behind the other, and the figure is the memory that they take together.

use std::path::Path;
use std::thread;
use std::time::Duration;

use vmtest::{Host, Vm};

use super::fig7;
use super::keeper::{self, Keeper, Setup};
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::footprint::{self, Course, Footprint};
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::work;
use crate::guard::guard;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 768;
const VMS: u32 = 3;

const NAME: &str = "hyperalloc-fig11";
/// Goal: most memory of all guests together, over time and at the peak, as a ratio to free page
/// reporting's. The paper's peaks are 28.11 and 35.98 GiB, which is 0.78.
const MOST: f64 = 0.8;
/// The keepers of the goal, Ebb's first, and the others, each with its number of blocks.
const CASES: [(&[Keeper], usize); 2] = [
    (&[Keeper::HyperAlloc, Keeper::Reporting], 5),
    (&[Keeper::VProbe, Keeper::Llfree, Keeper::Buddy], 1),
];

/// Size of the benchmark.
struct Scale {
    /// How often each guest works.
    works: u32,
    /// Rest of a guest after each work.
    rest: Duration,
    /// Time from the beginning of one guest to that of the next.
    apart: Duration,
}

// A guest begins about when the one before has compiled. So their peaks are apart, and a working
// guest has the processors for itself.
const FULL: Scale =
    Scale { works: 2, rest: Duration::from_secs(80), apart: Duration::from_secs(50) };
const QUICK: Scale =
    Scale { works: 1, rest: Duration::from_secs(50), apart: Duration::from_secs(35) };

/// Runs the benchmark.
///
/// # Errors
/// There is no such kernel, or no Debian to run.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let scale = if session.identity.quick { QUICK } else { FULL };
    keeper::note_kernels(&mut report)?;
    report.note(format!(
        "{VMS} guests of {MEMORY_MIB} MiB each compile Lua {} times, with {} s of rest after each, \
         and begin {} s apart.",
        scale.works,
        scale.rest.as_secs(),
        scale.apart.as_secs(),
    ));
    let ground = Host::new();
    let image = fig7::image(&ground)?;
    let mut all = Vec::new();
    for ((keepers, count), case) in CASES.into_iter().zip(["compiles", "others"]) {
        let count = if session.identity.quick { 1 } else { count };
        let sides = (keepers, |keeper: Keeper| keeper.name().to_owned());
        let taken = blocks
            .take(&mut report, case, sides, count, |keeper| one(keeper, image.image(), &scale))?;
        all.push(taken);
    }
    rows(&mut report, &all);
    plot(&report, &all)?;
    Ok(report)
}

fn one(keeper: Keeper, image: &Path, scale: &Scale) -> anyhow::Result<Figures> {
    let setup = Setup { memory_mib: MEMORY_MIB, cpus: 1, image: Some(image) };
    let host = Host::new();
    let vms: Vec<Vm> = (0..VMS).map(|_| keeper.start(&host, &setup)).collect();
    vms.iter().for_each(|vm| keeper.automatic(vm));
    let all: Vec<&Vm> = vms.iter().collect();
    let daemon = keeper.is_ebb().then_some(&host);
    let (seconds, course) =
        Footprint::during(&all, daemon, |course| together(&all, course, scale))?;
    let mut figures = Figures::new();
    add(&mut figures, "footprint", course.gib_s());
    add(&mut figures, "peak", course.peak_gib());
    add(&mut figures, "compile", seconds);
    course.add_to(&mut figures, "");
    Ok(figures)
}

/// Returns the mean time of a compile.
fn together(vms: &[&Vm], course: &Course, scale: &Scale) -> anyhow::Result<f64> {
    let one = |number: u32, vm: &Vm| -> anyhow::Result<f64> {
        course.rest(scale.apart * number)?;
        let mut sum = 0.0;
        for _ in 0..scale.works {
            sum += work::seconds(vm, &format!("program /mnt {}", work::COMPILE))?;
            work::seconds(vm, &format!("program /mnt {}", work::CLEAN))?;
            course.rest(scale.rest)?;
        }
        Ok(sum / f64::from(scale.works))
    };
    let one = &one;
    let sums = thread::scope(|scope| {
        let jobs =
            (0..).zip(vms).map(|(number, vm)| scope.spawn(move || guard(|| one(number, vm))));
        let jobs: Vec<_> = jobs.collect();
        let ended = jobs.into_iter().map(|job| job.join());
        let ended = ended.map(|job| job.unwrap_or_else(|panic| Err(crate::guard::reason(&*panic))));
        ended.sum::<anyhow::Result<f64>>()
    })?;
    Ok(sums / vms.len() as f64)
}

fn rows(report: &mut Report, all: &[Taken]) {
    let Some(judged) = all.first() else { return };
    let (ebb, reporting) = (Keeper::HyperAlloc.name(), Keeper::Reporting.name());
    let metrics = [
        ("footprint of all", "GiB-s", "footprint", Some(MOST)),
        ("peak of all", "GiB", "peak", Some(MOST)),
        ("a compile, guest's time", "s", "compile", None),
    ];
    for (what, unit, figure, goal) in metrics {
        let of_ebb = judged.rounds(ebb, figure);
        let others = all.iter().flat_map(|taken| taken.names().map(move |name| (taken, name)));
        for (taken, other) in others.filter(|(_, name)| *name != ebb) {
            let row = Row::new(format!("{what}, {ebb}"), unit, &of_ebb).failed(judged.failed());
            let row = row.against_vms(other, &taken.rounds(other, figure));
            report.row(match goal {
                Some(goal) if other == reporting => row.at_most(goal),
                _ => row,
            });
        }
    }
}

/// Draws the last block of each case.
fn plot(report: &Report, all: &[Taken]) -> anyhow::Result<()> {
    let of = |taken: &Taken| -> Vec<Series> {
        let line = |name: &str| Series {
            name: name.into(),
            points: footprint::points(taken, name),
            is_bound: false,
        };
        taken.names().map(line).collect()
    };
    let series = all.iter().flat_map(of);
    let panel = Panel { series: series.collect(), ..Panel::default() };
    let title = "The host's memory of three guests that compile now and then (HyperAlloc, fig. 11)";
    report.plot(&Figure { title, x_label: "s", y_label: "GiB", panels: &[panel] })
}
