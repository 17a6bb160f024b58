//! Figure 14: more and more guests, each of which starts a job that wants memory some
//! seconds after the one before, share what the host has for all of them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use vmtest::{Scratch, Vm, assets};

use super::compare::{self, Told};
use super::fig11::{self, IMAGE_BYTES};
use super::keeper::Keeper;
use super::linux::Linux;
use super::medium::Medium;
use super::rig::{self, Ground};
use super::setup::Setup;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::row::Better;
use crate::bench::samples::wait_until;
use crate::bench::session::Session;
use crate::bench::stats::geometric_mean;
use crate::bench::work;
use crate::guard::guard;
use crate::interrupt;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vswapper-fig14";
const MEMORY_MIB: u64 = 256;
/// For all guests together.
const HOST_MIB: u64 = 448;
/// Of the best baseline's time.
const GOAL: f64 = 0.9;
/// Guests in a quick run, and else.
const GUESTS: [u64; 2] = [3, 10];
/// What a guest at work gets for each part of one that rests.
const AT_WORK_WEIGHT: u64 = 3;
/// They share two processors or so, beside the memory.
const PATIENCE: Duration = Duration::from_secs(1200);
const APART: Duration = Duration::from_secs(10);
/// Guests that are not at rest within their limit by then never will be.
const TO_REST: Duration = Duration::from_secs(240);
/// How often what all guests have is looked at: that takes some 60 ms of a processor.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// What guests have on average may be so much more than their limit.
const MEAN_PERCENT: f64 = 105.0;
const TIME: Told =
    Told { what: "a job, geometric mean", unit: "s", figure: "job", better: Better::Less };
const TOLD: [Told; 6] = [
    Told { what: "the last job's end", unit: "s", figure: "all", better: Better::Less },
    compare::COUNTED[0],
    compare::COUNTED[1],
    Told {
        what: "memory of all guests, on average",
        unit: "MiB",
        figure: "held",
        better: Better::Less,
    },
    Told {
        what: "memory of all guests, at most",
        unit: "MiB",
        figure: "held-most",
        better: Better::Less,
    },
    compare::COUNTED[3],
];

/// Runs it.
///
/// # Errors
/// The host lacks what it needs, or there is no Debian to run.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    report.note(Linux::lacks());
    let archive = assets::userland().map_err(anyhow::Error::msg)?;
    let directory = Scratch::new("ebb-bench-")?;
    let image =
        rig::image(directory.path(), IMAGE_BYTES, |at| work::unpack_userland(&archive, at))?;
    let linux = fig11::screen_zstd(session, &mut report, &image)?;
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let guests = GUESTS[usize::from(!session.identity.quick)];
    let case = format!("{guests} guests");
    // So many guests take long.
    let linux = compare::best(&linux, 2);
    let sides = [&[Keeper::Ebb], linux].concat();
    let context = (session, &mut blocks, &mut report);
    let taken = compare::take(context, &case, &sides, |keeper| {
        compare::again(keeper, || together(keeper, guests, &image))
    })?;
    let sides = (Keeper::Ebb, linux);
    compare::rows(&mut report, &taken, TIME, sides, Some(GOAL));
    for told in TOLD {
        compare::rows(&mut report, &taken, told, sides, None);
    }
    let title = "Guests of 256 MB that start a compressor 10 s apart, with 448 MB for all \
        (VSwapper, fig. 14)";
    let y_label = "seconds a job";
    report.plot(&Figure { title, x_label: "guest", y_label, panels: &[picture(&taken)] })?;
    Ok(report)
}

fn together(keeper: Keeper, guests: u64, image: &Path) -> anyhow::Result<Figures> {
    let medium = Medium::Ssd;
    let setup = Setup::new(keeper, medium, [MEMORY_MIB, HOST_MIB], image);
    let ground = Ground::new(keeper, medium, guests * MEMORY_MIB)?;
    let booted = (0..guests).map(|_| ground.boot(&setup)).collect::<anyhow::Result<Vec<_>>>()?;
    let vms: Vec<&Vm> = booted.iter().map(|(vm, _)| vm).collect();
    vms.iter().for_each(|vm| vm.be_patient(PATIENCE));
    let manager = Manager { keeper, vms: &vms, at_work: Mutex::new(vec![false; vms.len()]) };
    rest(&ground, &manager)?;
    let (before, began) = (ground.ran()?, Instant::now());
    let (seconds, held) = watched(&ground, &vms, || jobs(&manager, began))?;
    let (all, after) = (began.elapsed(), ground.ran()?);
    let mut figures = Figures::new();
    add_held(&mut figures, &held)?;
    compare::add(&mut figures, "daemon-mib", ground.daemon_mib(&vms));
    compare::add(&mut figures, "job", geometric_mean(&seconds));
    compare::add(&mut figures, "all", all.as_secs_f64());
    compare::add(&mut figures, "cpu", after.group - before.group);
    compare::add(&mut figures, "host-cpu", after.host - before.host);
    figures.insert("course".into(), seconds);
    Ok(figures)
}

/// On all sides guests have no more than their limit together before the first job begins.
fn rest(ground: &Ground, manager: &Manager<'_>) -> anyhow::Result<()> {
    let (vms, end) = (manager.vms, Instant::now() + TO_REST);
    manager.share(&vec![false; vms.len()]);
    if !manager.keeper.is_ebb() {
        ground.limit(vms, MEMORY_MIB, HOST_MIB)?;
    }
    loop {
        interrupt::check()?;
        let has = ground.guests_mib(vms, MEMORY_MIB)?;
        if has <= HOST_MIB as f64 {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{has:.0} MiB of {HOST_MIB} are taken at rest");
        thread::sleep(Duration::from_millis(500));
    }
}

/// Does the work; what all guests had meanwhile, looked at on all sides alike.
fn watched<T>(
    ground: &Ground,
    vms: &[&Vm],
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, Vec<f64>)> {
    let is_done = &AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(move || {
            let mut held = Vec::new();
            while !is_done.load(Ordering::Relaxed) {
                held.push(guard(|| ground.guests_mib(vms, MEMORY_MIB))?);
                thread::park_timeout(LOOK_EVERY);
            }
            anyhow::Ok(held)
        });
        let done = guard(work);
        is_done.store(true, Ordering::Relaxed);
        watcher.thread().unpark();
        let held = watcher.join().unwrap_or_else(|panic| Err(crate::guard::reason(&*panic)));
        Ok((done?, held?))
    })
}

/// What all guests had, and that it was within their limit on average.
fn add_held(figures: &mut Figures, held: &[f64]) -> anyhow::Result<()> {
    let mean = held.iter().sum::<f64>() / held.len() as f64;
    let may = HOST_MIB as f64 * MEAN_PERCENT / 100.0;
    ensure!(mean <= may, "{mean:.0} MiB of {HOST_MIB} were taken on average: it does not hold");
    compare::add(figures, "held", mean);
    compare::add(figures, "held-most", held.iter().copied().fold(0.0, f64::max));
    Ok(())
}

/// Of each guest, how long its job took.
fn jobs(manager: &Manager<'_>, began: Instant) -> anyhow::Result<Vec<f64>> {
    thread::scope(|scope| {
        let job = |place: usize| {
            scope.spawn(move || {
                wait_until(began + APART * place as u32)?;
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
        let seconds = work::seconds(vm, &format!("program /mnt {}", work::COMPRESS_SHORT));
        self.set(place, false);
        seconds
    }

    fn set(&self, place: usize, at_work: bool) {
        let mut all = self.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        all[place] = at_work;
        self.share(&all);
    }

    fn share(&self, all: &[bool]) {
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

/// Of the last block.
fn picture(taken: &Taken) -> Panel {
    let series = |name: &str| Series {
        name: name.into(),
        points: (1..)
            .zip(taken.course(name, "course"))
            .map(|(guest, seconds)| (f64::from(guest), seconds))
            .collect(),
        is_bound: false,
    };
    Panel { series: taken.names().map(series).collect(), ..Panel::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_more_than_the_limit_on_average_is_not_held() {
        let mut figures = Figures::new();
        let limit = HOST_MIB as f64;
        // A peak passes, and is told.
        add_held(&mut figures, &[limit * 0.9, limit * 1.15, limit]).unwrap();
        assert_eq!(figures["held-most"], [limit * 1.15]);
        // What it has in the end is not all that counts.
        let error = add_held(&mut figures, &[limit * 1.2, limit * 1.1, limit]).unwrap_err();
        assert!(error.to_string().contains("on average"), "{error}");
        assert!(add_held(&mut figures, &[]).is_err());
    }
}
