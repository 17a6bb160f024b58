//! Figure 14: more and more guests, each of which starts a job that wants memory some
//! seconds after the one before, share what the host has for all of them.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use vmtest::{Scratch, Vm, assets};

use super::medium::Medium;
use super::rig::{self, Ground, Keeper, Setup};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::samples::wait_until;
use crate::bench::work;
use crate::guard::guard;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 256;
/// For all guests together.
const HOST_MIB: u64 = 448;
const IMAGE_BYTES: u64 = 1024 << 20;
/// What a guest at work gets for each part of one that rests.
const AT_WORK_WEIGHT: u64 = 3;
const APART: Duration = Duration::from_secs(10);
const KEEPERS: [Keeper; 4] = [Keeper::Anonymous, Keeper::Balloon, Keeper::Ebb, Keeper::EbbBalloon];

/// What became of so many guests with one keeper.
struct Run {
    keeper: Keeper,
    guests: u64,
    /// Of each job; none where a guest or its job was killed.
    seconds: Rounds,
    why: Option<String>,
}

/// Runs it.
///
/// # Errors
/// The host lacks what it needs, or there is no Debian to run.
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("vswapper-fig14");
    let archive = assets::userland().map_err(anyhow::Error::msg)?;
    let directory = Scratch::new("ebb-bench-")?;
    let image =
        rig::image(directory.path(), IMAGE_BYTES, |at| work::unpack_userland(&archive, at))?;
    let counts: &[u64] = if quick { &[3] } else { &[1, 2, 3, 4, 5] };
    let mut runs = Vec::new();
    for &guests in counts {
        for keeper in KEEPERS {
            let mut run = Run { keeper, guests, seconds: Rounds::default(), why: None };
            match guard(|| together(keeper, guests, &image)) {
                Ok(seconds) => run.seconds = seconds.into_iter().collect(),
                Err(why) => run.why = Some(format!("{why:#}")),
            }
            runs.push(run);
        }
        rows(&mut report, guests, &runs);
    }
    let title = "Guests of 256 MB that start a compressor 10 s apart, with 448 MB for all \
        (VSwapper, fig. 14)";
    let y_label = "seconds a job, mean";
    report.plot(&Figure { title, x_label: "guests", y_label, panels: &[picture(&runs)] })?;
    Ok(report)
}

fn together(keeper: Keeper, guests: u64, image: &Path) -> anyhow::Result<Vec<f64>> {
    let medium = Medium::Ssd;
    let setup = Setup::new(keeper, medium, [MEMORY_MIB, HOST_MIB], image);
    let ground = Ground::new(keeper, medium)?;
    let booted = (0..guests).map(|_| ground.boot(&setup)).collect::<anyhow::Result<Vec<_>>>()?;
    let vms: Vec<&Vm> = booted.iter().map(|(vm, _)| vm).collect();
    if !keeper.is_ebb() {
        ground.limit(&vms, MEMORY_MIB, HOST_MIB)?;
    }
    let manager = Manager { keeper, vms: &vms, at_work: Mutex::new(vec![false; vms.len()]) };
    let manager = &manager;
    let began = Instant::now();
    thread::scope(|scope| {
        let job = |place: usize| {
            scope.spawn(move || {
                let due = began + APART * place as u32;
                wait_until(due)?;
                guard(|| manager.job(place))
            })
        };
        let jobs: Vec<_> = (0..manager.vms.len()).map(job).collect();
        let ended = jobs.into_iter().map(|job| job.join());
        ended.map(|job| job.unwrap_or_else(|panic| Err(crate::guard::reason(&*panic)))).collect()
    })
}

/// Gives guests their parts of the host's memory: those at work more than those that rest.
struct Manager<'a> {
    keeper: Keeper,
    vms: &'a [&'a Vm],
    at_work: Mutex<Vec<bool>>,
}

impl Manager<'_> {
    fn job(&self, place: usize) -> anyhow::Result<f64> {
        let vm = self.vms[place];
        vm.forgive();
        self.set(place, true);
        let seconds = work::seconds(vm, &format!("program /mnt {}", work::COMPRESS));
        self.set(place, false);
        seconds
    }

    fn set(&self, place: usize, at_work: bool) {
        let mut all = self.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        all[place] = at_work;
        let weight = |at_work: bool| if at_work { AT_WORK_WEIGHT } else { 1 };
        let sum: u64 = all.iter().copied().map(weight).sum();
        let parts = all.iter().map(|at_work| HOST_MIB * weight(*at_work) / sum);
        let mut parts: Vec<_> = self.vms.iter().zip(parts).collect();
        // First whoever has to give.
        parts.sort_by_key(|(_, part)| *part);
        for (vm, part) in parts {
            self.keeper.share(vm, part.min(MEMORY_MIB), MEMORY_MIB);
        }
    }
}

fn rows(report: &mut Report, guests: u64, runs: &[Run]) {
    let runs: Vec<&Run> = runs.iter().filter(|run| run.guests == guests).collect();
    for run in &runs {
        if let Some(why) = &run.why {
            report.note(format!("{guests} guests, {}: {why}.", run.keeper.name()));
        }
    }
    for ebb in runs.iter().filter(|run| run.keeper.is_ebb()) {
        for other in runs.iter().filter(|run| !run.keeper.is_ebb()) {
            let what = format!("{guests} guests: a job, {}", ebb.keeper.name());
            let row = Row::new(what, "s", &ebb.mean());
            report.row(row.against(other.keeper.name(), &other.mean()));
        }
    }
}

impl Run {
    fn mean(&self) -> Rounds {
        self.seconds.mean().into_iter().collect()
    }
}

fn picture(runs: &[Run]) -> Panel {
    let series = |keeper: Keeper| {
        let of = runs.iter().filter(|run| run.keeper == keeper);
        let points = of.filter_map(|run| Some((run.guests as f64, run.seconds.mean()?)));
        Series { name: keeper.name().into(), points: points.collect(), is_bound: false }
    };
    Panel { series: KEEPERS.map(series).into(), ..Panel::default() }
}
