//! Figure 5 on tiers that are reached by fault: what a guest's program manages while most of its
//! memory is in a swap file, or compressed, held there by Ebb and by Linux.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_units::FRAME_BYTES;
use vmtest::{Scratch, Vm};

use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::samples::wait_until;
use crate::bench::swap::medium::{Medium, Traffic};
use crate::bench::swap::rig::{self, Keeper, Rig, Setup};
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

/// What the guest believes to have.
const MEMORY_MIB: u64 = 512;
/// Fast memory.
const LIMIT_MIB: u64 = 200;
const PROGRAM_MIB: u64 = 320;
const IMAGE_BYTES: u64 = 64 << 20;
const GOAL: f64 = 1.5;
/// Of the program's pages, in a phase.
const HOT_PERCENT: u64 = 20;

/// What the program's pages hold, by the name that the guest gives them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Noise,
    /// To an eighth.
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

    /// Ebb first.
    fn keepers(self) -> &'static [Keeper] {
        match self {
            Content::Noise => &[
                Keeper::EbbByHeat,
                Keeper::Ebb,
                Keeper::EbbByThreshold,
                Keeper::Anonymous,
                Keeper::Memfd,
            ],
            Content::Shrinks => &[Keeper::EbbCompressed, Keeper::Anonymous, Keeper::Zswap],
        }
    }
}

/// What one VM's program managed.
struct Run {
    keeper: Keeper,
    zipf: Slices,
    phased: Slices,
}

/// One after the other.
#[derive(Default)]
struct Slices {
    /// Accesses a second.
    speed: Rounds,
    /// Of each slice, what went over the swap device for a thousand accesses: see [`DISK`].
    disk: [Rounds; 3],
    guest_mib: Rounds,
    course: Vec<(f64, f64)>,
}

/// What is told of the traffic.
type Told = (&'static str, fn(&Traffic) -> u64);

const DISK: [Told; 3] = [
    ("reads of the disk", |traffic| traffic.read_requests),
    ("pages read", |traffic| traffic.read_pages),
    ("pages written", |traffic| traffic.write_pages),
];

/// How long one is, and how many there are.
#[derive(Clone, Copy)]
struct Scale {
    slice: Duration,
    slices: u32,
}

/// Runs it.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("vtmm-fig5-fault");
    report.note(format!(
        "A guest believes to have {MEMORY_MIB} MiB and has {LIMIT_MIB}; a program with {PROGRAM_MIB} \
         MiB accesses them at random: by Zipf's law, and 90 % of the time {HOT_PERCENT} % of them, \
         others in each slice. The rest is swapped to a loop device with direct I/O on this \
         machine's disk, or compressed."
    ));
    let directory = Scratch::new("ebb-bench-")?;
    let image = rig::image(directory.path(), IMAGE_BYTES, |_| Ok(()))?;
    let seconds = if quick { 3 } else { 10 };
    let scale = Scale { slice: Duration::from_secs(seconds), slices: if quick { 3 } else { 6 } };
    let mut panels = Vec::new();
    for content in [Content::Noise, Content::Shrinks] {
        let mut runs = Vec::new();
        for &keeper in content.keepers() {
            match work::again_if_killed(|| one(keeper, content, &image, scale)) {
                Ok(run) => runs.push(run),
                Err(why) => report.note(format!("{}, {}: {why:#}", content.name(), keeper.name())),
            }
        }
        rows(&mut report, content, &runs);
        panels.extend(pictures(content, &runs));
    }
    let title = "Accesses while most memory is elsewhere (vTMM, fig. 5)";
    report.plot(&Figure { title, x_label: "s", y_label: "accesses/s", panels: &panels })?;
    Ok(report)
}

fn one(keeper: Keeper, content: Content, image: &Path, scale: Scale) -> anyhow::Result<Run> {
    let setup = Setup::new(keeper, Medium::Ssd, [MEMORY_MIB, LIMIT_MIB], image);
    // Who monitors sees uses only where page tables are loaded again and again.
    let rig = Rig::start(&Setup { cpus: 2, append: "pti=on", ..setup })?;
    let name = content.buffer();
    rig.vm.guest(&format!("access {name} {PROGRAM_MIB}M zipf"));
    if keeper.is_monitored() {
        rig.vm.ebb("heat --fresh").ok();
    }
    // What was written first is not what is hot.
    slices(&rig, content, scale, |_| ())?;
    let zipf = slices(&rig, content, scale, |_| ())?;
    let pages = (PROGRAM_MIB << 20) / FRAME_BYTES;
    let hot = pages * HOT_PERCENT / 100;
    let phased = slices(&rig, content, scale, |slice| {
        let first = u64::from(slice) * hot % pages;
        rig.vm.guest(&format!("accesslaw {name} hot {first} {hot}"));
    })?;
    let stopped = rig.vm.guest(&format!("accessstop {name}"));
    anyhow::ensure!(stopped.ends_with(" 0"), "wrong bytes: {stopped}");
    Ok(Run { keeper, zipf, phased })
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
        for (rounds, (_, of)) in slices.disk.iter_mut().zip(DISK) {
            rounds.push(1e3 * of(&traffic) as f64 / accesses);
        }
        slices.guest_mib.push(rig.guest_mib()? as f64);
        let at = f64::from(slice + 1) * scale.slice.as_secs_f64();
        slices.course.push((at, accesses / seconds));
    }
    Ok(slices)
}

/// Accesses to a program's memory of this name, and seconds by the guest's clock.
///
/// # Errors
/// The guest answers something else.
pub fn so_far(vm: &Vm, name: &str) -> anyhow::Result<(f64, f64)> {
    let answer = vm.guest(&format!("accesson {name} 0"));
    let (accesses, us) = answer.split_once(' ').context("two numbers")?;
    Ok((accesses.parse()?, us.parse::<f64>()? / 1e6))
}

fn rows(report: &mut Report, content: Content, runs: &[Run]) {
    let Some((ebb, others)) = runs.split_first().filter(|(ebb, _)| ebb.keeper.is_ebb()) else {
        return;
    };
    for other in others {
        let against = other.keeper.name();
        for (load, ebb, other_run) in
            [("zipf", &ebb.zipf, &other.zipf), ("phased", &ebb.phased, &other.phased)]
        {
            let what = |figure| format!("{load}, {}: {figure}", content.name());
            let row = Row::new(what("accesses"), "/s", &ebb.speed);
            let row = row.against(against, &other_run.speed);
            report.row(if other.keeper.is_ebb() { row } else { row.at_least(GOAL) });
            for ((ebb, other), (name, _)) in ebb.disk.iter().zip(&other_run.disk).zip(DISK) {
                report.row(Row::new(what(name), "of 1000", ebb).against(against, other));
            }
            let row = Row::new(what("memory that it has"), "MiB", &ebb.guest_mib);
            report.row(row.against(against, &other_run.guest_mib));
        }
    }
}

fn pictures(content: Content, runs: &[Run]) -> [Panel; 2] {
    let panel = |load: &str, of: fn(&Run) -> &Slices| Panel {
        title: format!("{load}, {}", content.name()),
        series: runs
            .iter()
            .map(|run| Series {
                name: run.keeper.name().into(),
                points: of(run).course.clone(),
                is_bound: false,
            })
            .collect(),
        ..Panel::default()
    };
    [panel("zipf", |run| &run.zipf), panel("phased", |run| &run.phased)]
}
