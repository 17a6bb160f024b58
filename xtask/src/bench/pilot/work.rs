//! What three guests of unlike kinds get done on a host that has 60 % of their memory.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vmtest::Vm;

use super::requests::{Done, KINDS, PIECE_MIB, PIECES, piece};
use super::rest;
use super::side::Side;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::rounds::percentile_us;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::stats::{Random, geometric_mean};
use crate::bench::swap::compare;
use crate::bench::swap::held::{self, Held};
use crate::bench::swap::linux::Linux;
use crate::bench::swap::medium::Medium;
use crate::bench::swap::rig::{self, Ground};
use crate::bench::swap::setup::Setup;
use crate::bench::{sweep, work};
use crate::guard::{guard, reason};
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "pilot-work";
/// Memory that each guest believes to have.
const MEMORY_MIB: u64 = 384;
const HOST_PERCENT: u64 = 60;
const HOST_MIB: u64 = MEMORY_MIB * KINDS.len() as u64 * HOST_PERCENT / 100;
const IMAGE_BYTES: u64 = 400 << 20;
/// Time between two samples of all guests' memory.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Least part of the work done with memory for all.
const PART: f64 = 0.95;
/// Greatest part of the time of a request with memory for all.
const TIMES: f64 = 1.05;
const OVERALL: &str = "work";

/// Time of a phase and of the rest before the first one, in seconds, and blocks.
struct Scale {
    phase_s: u64,
    rest: Duration,
    blocks: usize,
}

const FULL: Scale = Scale { phase_s: 12, rest: Duration::from_secs(6), blocks: compare::BLOCKS };
const QUICK: Scale = Scale { phase_s: 6, rest: Duration::from_secs(3), blocks: 1 };

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    report.note(Linux::lacks());
    let scale = if session.identity.quick { QUICK } else { FULL };
    report.note(format!(
        "Three guests of {MEMORY_MIB} MiB, each with {PIECES} pieces of {PIECE_MIB} MiB: a server \
         that checks memory (latency), one that reads files (normal), and a builder that rewrites \
         memory (batch). In each of three phases of {} s another one uses all of its pieces, and \
         the others few. All together may have {HOST_MIB} MiB, {HOST_PERCENT} % of what they \
         believe to have. With the pilot, a control group of this size is the host, of which the \
         pilot's reserve is a tenth. No side may have more than that on average by over 10 %.",
        scale.phase_s
    ));
    let directory = sweep::scratch()?;
    let image = rig::image(directory.path(), IMAGE_BYTES, |at| {
        let file = |number| work::random_file(&at.join(piece(number)), PIECE_MIB << 20);
        (0..PIECES).try_for_each(file)
    })?;
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let sides = Side::all();
    let case = format!("three VMs, {HOST_MIB} MiB");
    let named = (&sides[..], Side::name as fn(Side) -> String);
    let taken = blocks.take(&mut report, &case, named, scale.blocks, |side| {
        let figures = compare::again(side.keeper(), || one(side, &image, &scale))?;
        held::check(&figures, held::LINUX_PERCENT)?;
        Ok(figures)
    })?;
    rows(&mut report, &taken, &sides);
    plot(&report, &taken, &scale)?;
    Ok(report)
}

fn one(side: Side, image: &Path, scale: &Scale) -> anyhow::Result<Figures> {
    let (keeper, medium) = (side.keeper(), Medium::Ssd);
    let setup = Setup::new(keeper, medium, [MEMORY_MIB, HOST_MIB], image);
    let ground = Ground::new(keeper, medium, [MEMORY_MIB * KINDS.len() as u64, HOST_MIB])?;
    let booted = ground.boot_all(&setup, KINDS.len() as u64)?;
    let vms: Vec<&Vm> = booted.iter().map(|(vm, _)| vm).collect();
    side.share(&ground, &vms, (MEMORY_MIB, HOST_MIB))?;
    let look = || side.look(&ground, &vms, (MEMORY_MIB, HOST_MIB));
    Held::during(LOOK_EVERY, look, || {
        // One after the other: it is no race for memory yet.
        KINDS.iter().zip(&vms).try_for_each(|(kind, vm)| kind.prepare(vm))?;
        rest(scale.rest)
    })?;
    let mut figures = Figures::new();
    let (done, held) = compare::counted_on(&mut figures, (&ground, &vms, MEMORY_MIB), || {
        Held::during(LOOK_EVERY, look, || phases(&vms, scale))
    })?;
    held.add_to(&mut figures, side.bound(HOST_MIB));
    let seconds = scale.phase_s * KINDS.len() as u64;
    let mut rates = Vec::new();
    for (kind, done) in KINDS.iter().zip(done) {
        let rate = done.requests.len() as f64 / seconds as f64;
        rates.push(rate);
        add(&mut figures, &of(kind.name, "rate"), rate);
        for percent in [50, 99] {
            let ms = percentile_us(&mut done.times(), percent) / 1e3;
            add(&mut figures, &of(kind.name, &format!("p{percent}")), ms);
        }
        figures.insert(of(kind.name, "course"), done.course(seconds));
    }
    add(&mut figures, OVERALL, geometric_mean(&rates));
    Ok(figures)
}

fn of(kind: &str, what: &str) -> String {
    format!("{kind}, {what}")
}

/// Does something with each guest, all at once.
fn each<T: Send>(
    vms: &[&Vm],
    work: impl Fn(usize, &Vm) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    thread::scope(|scope| {
        let work = &work;
        let jobs = vms.iter().enumerate();
        let jobs = jobs.map(|(place, vm)| scope.spawn(move || guard(|| work(place, vm))));
        let jobs: Vec<_> = jobs.collect();
        let ended = jobs.into_iter().map(|job| job.join());
        ended.map(|job| job.unwrap_or_else(|panic| Err(reason(&*panic)))).collect()
    })
}

/// Has all guests work. In each phase, another one needs all that it has.
fn phases(vms: &[&Vm], scale: &Scale) -> anyhow::Result<Vec<Done>> {
    let began = Instant::now();
    each(vms, |place, vm| {
        vm.forgive();
        let (mut random, mut done) = (Random::new(place as u64 + 1), Done::default());
        for phase in 0..KINDS.len() {
            let end = began + Duration::from_secs(scale.phase_s) * (phase as u32 + 1);
            let chance = (&mut random, &mut done);
            KINDS[place].work(vm, (began, end), phase == place, chance)?;
        }
        Ok(done)
    })
}

fn rows(report: &mut Report, taken: &Taken, sides: &[Side]) {
    let pilot = Side::Pilot.name();
    let row = |what: String, unit, figure: &str, other: &Side| {
        let row = Row::new(what, unit, &taken.rounds(&pilot, figure)).failed(taken.failed());
        row.against_vms(other.name(), &taken.rounds(&other.name(), figure))
    };
    for other in &sides[1..] {
        let is_all = *other == Side::Plenty;
        let work = row("work of all, geometric mean".into(), "requests/s", OVERALL, other);
        report.row(work.at_least(if is_all { PART } else { 1.0 }));
        let p99 = of(KINDS[0].name, "p99");
        let time = row("p99 of the server's requests".into(), "ms", &p99, other);
        report.row(time.at_most(if is_all { TIMES } else { 1.0 }));
    }
    for other in &sides[1..] {
        for kind in KINDS {
            for (what, unit) in [("rate", "requests/s"), ("p50", "ms"), ("p99", "ms")] {
                let (name, figure) = (kind.name, of(kind.name, what));
                report.row(row(format!("{name}: {what}"), unit, &figure, other));
            }
        }
        let memory = "memory of all guests on average".to_owned();
        report.row(row(memory, "MiB", held::GUESTS, other));
        report.row(row("CPU of QEMUs and the daemon".into(), "s", "cpu", other));
    }
}

/// Draws the last block.
fn plot(report: &Report, taken: &Taken, scale: &Scale) -> anyhow::Result<()> {
    let series = |name: &str, kind: &str| Series {
        name: name.into(),
        points: (0..)
            .zip(taken.course(name, &of(kind, "course")))
            .map(|(second, count)| (f64::from(second), count))
            .collect(),
        is_bound: false,
    };
    let panel = |(place, kind): (usize, &super::requests::Kind)| {
        let [begin, end] = [place, place + 1].map(|phase| (phase as u64 * scale.phase_s) as f64);
        Panel {
            title: format!("{} ({})", kind.name, kind.class),
            series: taken.names().map(|name| series(name, kind.name)).collect(),
            marks: vec![(begin, "needs all".into()), (end, String::new())],
            ..Panel::default()
        }
    };
    let panels: Vec<Panel> = KINDS.iter().enumerate().map(panel).collect();
    let title = "Three guests on a host with 60 % of their memory";
    report.plot(&Figure { title, x_label: "s", y_label: "requests/s", panels: &panels })
}
