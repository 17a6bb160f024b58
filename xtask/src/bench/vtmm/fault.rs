//! Figure 5 on tiers that are reached by fault: what a guest's program manages while most of its
//! memory is in a swap file or compressed, with Ebb and with Linux.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_units::FRAME_BYTES;
use vmtest::Vm;

use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::row::{Better, Row};
use crate::bench::samples::wait_until;
use crate::bench::session::Session;
use crate::bench::swap::compare::{self, Metric, Screening};
use crate::bench::swap::keeper::{Keeper, PLAIN_LINUX};
use crate::bench::swap::linux::Linux;
use crate::bench::swap::medium::{Medium, Traffic};
use crate::bench::swap::rig::{self, Rig};
use crate::bench::swap::setup::Setup;
use crate::bench::sweep;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vtmm-fig5-fault";
/// Memory that the guest believes to have.
const MEMORY_MIB: u64 = 512;
/// Fast memory.
const LIMIT_MIB: u64 = 200;
const PROGRAM_MIB: u64 = 320;
const IMAGE_BYTES: u64 = 64 << 20;
/// Hot part of the program's pages in a phase, in percent.
const HOT_PERCENT: u64 = 20;

/// Content of the program's pages, by the name that the guest gives it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Noise,
    /// Pages that compress to an eighth.
    Shrinks,
}

impl Content {
    fn buffer(self) -> &'static str {
        match self {
            Content::Noise => "noise",
            Content::Shrinks => "soft",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Content::Noise => "does not shrink",
            Content::Shrinks => "shrinks",
        }
    }

    /// Returns Ebb as it is compared with Linux, and Ebb's other ways.
    fn ebb(self) -> (Keeper, &'static [Keeper]) {
        match self {
            Content::Noise => (Keeper::Ebb, &[Keeper::EbbByHeat, Keeper::EbbByThreshold]),
            Content::Shrinks => (Keeper::EbbCompressed, &[]),
        }
    }

    /// Returns the ways of Linux that go on. Its memfd must be among them where the goal is against
    /// it.
    fn linux(self, screened: &[Keeper]) -> Vec<Keeper> {
        let mut linux = compare::best(screened, 2).to_vec();
        let [_, memfd] = PLAIN_LINUX;
        if self == Content::Noise && !linux.contains(&memfd) {
            linux.push(memfd);
        }
        linux
    }

    /// Returns the goal: the least part of the speed of the best of Linux's ways.
    fn goal(self) -> f64 {
        match self {
            Content::Noise => 1.0,
            Content::Shrinks => 1.5,
        }
    }
}

/// A figure of the traffic: its name, and how to get it.
type Of = (&'static str, fn(&Traffic) -> u64);

const DISK: [Of; 3] = [
    ("reads of the disk", |traffic| traffic.read_requests),
    ("pages read", |traffic| traffic.read_pages),
    ("pages written", |traffic| traffic.write_pages),
];

/// Slices of a measurement.
#[derive(Clone, Copy)]
struct Scale {
    /// Length of a slice.
    slice: Duration,
    /// Number of slices for each load.
    slices: u32,
    /// Whether there is also a load whose hot set moves with each slice.
    is_phased: bool,
}

const FULL: Scale = Scale { slice: Duration::from_secs(5), slices: 3, is_phased: true };
const QUICK: Scale = Scale { slice: Duration::from_secs(3), slices: 3, is_phased: true };
const SCREENING: Scale = Scale { slice: Duration::from_secs(5), slices: 1, is_phased: false };

const LOADS: [Metric; 2] = [
    Metric { what: "accesses, zipf", unit: "/s", figure: "zipf", better: Better::More },
    Metric { what: "accesses, phased", unit: "/s", figure: "phased", better: Better::More },
];

/// Cost of one access, and the figure with the cost of all accesses. Slices are equally long on all
/// sides, so they differ in their accesses.
const EACH: [(Metric, &str); 2] = [
    (each("CPU of QEMU and the daemon, an access", "cpu-each"), "cpu"),
    (
        each("CPU of all that the host did but for this bench, an access", "host-cpu-each"),
        "host-cpu",
    ),
];

const fn each(what: &'static str, figure: &'static str) -> Metric {
    Metric { what, unit: "us", figure, better: Better::Less }
}

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    report.note(format!(
        "A guest believes to have {MEMORY_MIB} MiB and has {LIMIT_MIB}; a program with {PROGRAM_MIB} \
         MiB accesses them at random: by Zipf's law, and 90 % of the time {HOT_PERCENT} % of them, \
         others in each slice. The rest is swapped to a loop device with direct I/O on this \
         machine's disk, or compressed."
    ));
    report.note(Linux::lacks());
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let directory = sweep::scratch()?;
    let image = rig::image(directory.path(), IMAGE_BYTES, |_| Ok(()))?;
    let scale = if session.identity.quick { QUICK } else { FULL };
    let mut panels = Vec::new();
    for content in [Content::Noise, Content::Shrinks] {
        let take = |keeper, scale| compare::again(keeper, || one(keeper, content, &image, scale));
        let (ebb, beside) = content.ebb();
        let context = (session, &mut blocks, &mut report);
        let screening = Screening {
            cases: [content.name(); 2],
            metric: LOADS[0],
            ebb,
            beside: &[],
            shrinks: content == Content::Shrinks,
            medium: Medium::Ssd,
        };
        let screened = compare::screen(context, &screening, |keeper, _| take(keeper, SCREENING))?;
        let linux = &content.linux(&screened);
        let sides = [&[ebb], beside, linux].concat();
        let context = (session, &mut blocks, &mut report);
        let taken = compare::take(context, content.name(), &sides, |keeper| take(keeper, scale))?;
        rows(&mut report, content, &taken, linux);
        panels.extend(pictures(content, &taken, scale));
    }
    let title = "Accesses while most memory is elsewhere (vTMM, fig. 5)";
    report.plot(&Figure { title, x_label: "s", y_label: "accesses/s", panels: &panels })?;
    Ok(report)
}

fn one(keeper: Keeper, content: Content, image: &Path, scale: Scale) -> anyhow::Result<Figures> {
    let setup = Setup::new(keeper, Medium::Ssd, [MEMORY_MIB, LIMIT_MIB], image);
    // Monitoring sees uses only if page tables are loaded again and again.
    let rig = Rig::start(&Setup { cpus: 2, append: "pti=on", ..setup })?;
    let name = content.buffer();
    rig.vm.guest(&format!("access {name} {PROGRAM_MIB}M zipf"));
    if keeper.is_monitored() {
        rig.vm.ebb("heat --fresh").ok();
    }
    // These slices do not count: the memory that was written first is not the hot memory.
    slices(&rig, content, scale, |_| ())?;
    let before = so_far(&rig.vm, name)?.0;
    let mut accesses = 0.0;
    let mut figures = compare::counting(&rig, |figures| {
        slices(&rig, content, scale, |_| ())?.add_to(figures, "zipf");
        if scale.is_phased {
            let pages = (PROGRAM_MIB << 20) / FRAME_BYTES;
            let hot = pages * HOT_PERCENT / 100;
            let phased = slices(&rig, content, scale, |slice| {
                let first = u64::from(slice) * hot % pages;
                rig.vm.guest(&format!("accesslaw {name} hot {first} {hot}"));
            })?;
            phased.add_to(figures, "phased");
        }
        accesses = so_far(&rig.vm, name)?.0 - before;
        let stopped = rig.vm.guest(&format!("accessstop {name}"));
        anyhow::ensure!(stopped.ends_with(" 0"), "wrong bytes: {stopped}");
        Ok(())
    })?;
    for (metric, of) in EACH {
        let all: f64 = figures.get(of).into_iter().flatten().sum();
        compare::add(&mut figures, metric.figure, 1e6 * all / accesses);
    }
    Ok(figures)
}

/// Figures of all slices, one after the other.
#[derive(Default)]
struct Slices {
    /// Accesses a second.
    speed: Vec<f64>,
    /// Traffic of the swap device in each slice, for a thousand accesses: see [`DISK`].
    disk: [Vec<f64>; 3],
}

impl Slices {
    fn add_to(self, figures: &mut Figures, load: &str) {
        figures.insert(load.to_owned(), self.speed);
        for (disk, (name, _)) in self.disk.into_iter().zip(DISK) {
            figures.insert(format!("{load}, {name}"), disk);
        }
    }
}

fn slices(
    rig: &Rig,
    content: Content,
    scale: Scale,
    mut begin: impl FnMut(u32),
) -> anyhow::Result<Slices> {
    let mut slices = Slices::default();
    for slice in 0..scale.slices {
        begin(slice);
        let (before, traffic) = (so_far(&rig.vm, content.buffer())?, rig.traffic()?);
        wait_until(Instant::now() + scale.slice)?;
        let after = so_far(&rig.vm, content.buffer())?;
        let traffic = (rig.traffic()? - traffic).swap;
        let (accesses, seconds) = (after.0 - before.0, after.1 - before.1);
        slices.speed.push(accesses / seconds);
        for (disk, (_, of)) in slices.disk.iter_mut().zip(DISK) {
            disk.push(1e3 * of(&traffic) as f64 / accesses);
        }
    }
    Ok(slices)
}

/// Returns the accesses so far to a program's memory of this name, and seconds by the guest's
/// clock.
///
/// # Errors
/// The guest answers something else.
pub fn so_far(vm: &Vm, name: &str) -> anyhow::Result<(f64, f64)> {
    let answer = vm.guest(&format!("accesson {name} 0"));
    let (accesses, us) = answer.split_once(' ').context("two numbers")?;
    Ok((accesses.parse()?, us.parse::<f64>()? / 1e6))
}

fn rows(report: &mut Report, content: Content, taken: &Taken, linux: &[Keeper]) {
    let (ebb, beside) = content.ebb();
    for load in LOADS {
        compare::rows(report, taken, load, (ebb, linux), Some(content.goal()));
        compare::rows(report, taken, load, (ebb, beside), None);
        for (name, _) in DISK {
            let figure = format!("{}, {name}", load.figure);
            for keeper in linux {
                let [ebb, other] =
                    [ebb, *keeper].map(|keeper| taken.rounds(&keeper.name(), &figure));
                let what = format!("{}: {figure}", taken.case);
                report.row(Row::new(what, "of 1000", &ebb).against(keeper.name(), &other));
            }
        }
    }
    for (metric, _) in EACH {
        compare::rows(report, taken, metric, (ebb, linux), None);
    }
    compare::costs(report, taken, ebb, linux);
}

/// Draws the last block.
fn pictures(content: Content, taken: &Taken, scale: Scale) -> [Panel; 2] {
    LOADS.map(|load| Panel {
        title: format!("{}, {}", load.figure, content.name()),
        series: taken
            .names()
            .map(|name| Series {
                name: name.into(),
                points: (1..)
                    .zip(taken.course(name, load.figure))
                    .map(|(slice, speed)| (f64::from(slice) * scale.slice.as_secs_f64(), speed))
                    .collect(),
                is_bound: false,
            })
            .collect(),
        ..Panel::default()
    })
}
