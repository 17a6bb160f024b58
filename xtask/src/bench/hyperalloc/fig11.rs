//! Figures 10 and 11: guests that work again and again and rest in between; three of them, one
//! behind the other, and what they take together.

use std::path::Path;
use std::thread;
use std::time::Duration;

use vmtest::{Host, Vm};

use super::fig7;
use super::keeper::{self, Keeper, Setup};
use crate::bench::footprint::{Course, Footprint};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::work;
use crate::guard::guard;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 768;
const VMS: u32 = 3;

/// How often each guest works; how long it rests after that; how far apart guests begin.
struct Scale {
    rounds: usize,
    works: usize,
    rest: Duration,
    apart: Duration,
}

// A guest begins about when the one before has compiled: their peaks lie apart, and one that
// works has the processors for itself.
const FULL: Scale =
    Scale { rounds: 1, works: 3, rest: Duration::from_secs(120), apart: Duration::from_secs(60) };
const QUICK: Scale =
    Scale { rounds: 1, works: 2, rest: Duration::from_secs(50), apart: Duration::from_secs(35) };

/// What became of one keeper's guests.
struct Run {
    keeper: Keeper,
    footprint: Rounds,
    peak: Rounds,
    work_s: Rounds,
    /// Of the last round.
    course: Option<Footprint>,
}

/// Runs it.
///
/// # Errors
/// There is no such kernel, or no Debian to run.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("hyperalloc-fig11");
    let scale = if quick { QUICK } else { FULL };
    keeper::note_kernels(&mut report)?;
    report.note(format!(
        "{VMS} guests of {MEMORY_MIB} MiB each compile Lua {} times, with {} s of rest after each, \
         and begin {} s apart; {} rounds.",
        scale.works,
        scale.rest.as_secs(),
        scale.apart.as_secs(),
        scale.rounds
    ));
    let ground = Host::new();
    let image = fig7::image(&ground)?;
    let new = Rounds::default;
    let mut runs = fig7::KEEPERS.map(|keeper| Run {
        keeper,
        footprint: new(),
        peak: new(),
        work_s: new(),
        course: None,
    });
    for round in 0..scale.rounds {
        for run in session.in_turn(&mut runs, &format!("hyperalloc-fig11, {round}")) {
            run.round(image.image(), &scale)?;
        }
    }
    rows(&mut report, &runs);
    plot(&report, &runs)?;
    Ok(report)
}

impl Run {
    fn round(&mut self, image: &Path, scale: &Scale) -> anyhow::Result<()> {
        let setup = Setup { memory_mib: MEMORY_MIB, cpus: 1, image: Some(image) };
        let host = Host::new();
        let vms: Vec<Vm> = (0..VMS).map(|_| self.keeper.start(&host, &setup)).collect();
        vms.iter().for_each(|vm| self.keeper.automatic(vm));
        let all: Vec<&Vm> = vms.iter().collect();
        let daemon = self.keeper.is_ebb().then_some(&host);
        let (seconds, course) =
            Footprint::during(&all, daemon, |course| together(&all, course, scale))?;
        self.footprint.push(course.gib_s());
        self.peak.push(course.peak_gib());
        self.work_s.push(seconds);
        self.course = Some(course);
        Ok(())
    }
}

/// The mean time of a compile.
fn together(vms: &[&Vm], course: &Course, scale: &Scale) -> anyhow::Result<f64> {
    let one = |number: u32, vm: &Vm| -> anyhow::Result<f64> {
        course.rest(scale.apart * number)?;
        let mut sum = 0.0;
        for _ in 0..scale.works {
            sum += work::seconds(vm, &format!("program /mnt {}", work::COMPILE))?;
            work::seconds(vm, &format!("program /mnt {}", work::CLEAN))?;
            course.rest(scale.rest)?;
        }
        Ok(sum / scale.works as f64)
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

fn rows(report: &mut Report, runs: &[Run; 5]) {
    let [ebb, others @ ..] = runs;
    let mut rows = |what: &str, unit, of: &dyn Fn(&Run) -> &Rounds| {
        for other in others {
            let row = Row::new(format!("{what}, {}", ebb.keeper.name()), unit, of(ebb));
            report.row(row.against(other.keeper.name(), of(other)));
        }
    };
    rows("footprint of all", "GiB-s", &|run| &run.footprint);
    rows("peak of all", "GiB", &|run| &run.peak);
    rows("a compile, guest's time", "s", &|run| &run.work_s);
}

fn plot(report: &Report, runs: &[Run; 5]) -> anyhow::Result<()> {
    let series = runs.iter().filter_map(|run| {
        let points = run.course.as_ref()?.points().into();
        Some(Series { name: run.keeper.name().into(), points, is_bound: false })
    });
    let panel = Panel { series: series.collect(), ..Panel::default() };
    let title = "The host's memory of three guests that compile now and then (HyperAlloc, fig. 11)";
    report.plot(&Figure { title, x_label: "s", y_label: "GiB", panels: &[panel] })
}
