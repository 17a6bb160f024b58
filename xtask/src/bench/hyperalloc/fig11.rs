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
         and begin {} s apart; once with each keeper.",
        scale.works,
        scale.rest.as_secs(),
        scale.apart.as_secs(),
    ));
    let ground = Host::new();
    let image = fig7::image(&ground)?;
    let sides = (&fig7::KEEPERS[..], |keeper: Keeper| keeper.name().to_owned());
    // No goal depends on it.
    let taken = blocks
        .take(&mut report, "compiles", sides, 1, |keeper| one(keeper, image.image(), &scale))?;
    rows(&mut report, &taken);
    plot(&report, &taken)?;
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

fn rows(report: &mut Report, taken: &Taken) {
    let [ebb, others @ ..] = fig7::KEEPERS.map(Keeper::name);
    let metrics = [
        ("footprint of all", "GiB-s", "footprint"),
        ("peak of all", "GiB", "peak"),
        ("a compile, guest's time", "s", "compile"),
    ];
    for (what, unit, figure) in metrics {
        let of_ebb = taken.rounds(ebb, figure);
        for other in others {
            let row = Row::new(format!("{what}, {ebb}"), unit, &of_ebb).failed(taken.failed());
            report.row(row.against(other, &taken.rounds(other, figure)));
        }
    }
}

fn plot(report: &Report, taken: &Taken) -> anyhow::Result<()> {
    let series = taken.names().map(|name| Series {
        name: name.into(),
        points: footprint::points(taken, name),
        is_bound: false,
    });
    let panel = Panel { series: series.collect(), ..Panel::default() };
    let title = "The host's memory of three guests that compile now and then (HyperAlloc, fig. 11)";
    report.plot(&Figure { title, x_label: "s", y_label: "GiB", panels: &[panel] })
}
