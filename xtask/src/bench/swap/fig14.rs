//! Figure 14: more and more guests share what the host has for all of them. Each guest starts a
//! memory-hungry job some seconds after the one before.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use vmtest::{Vm, assets};

use super::compare::{self, Metric};
use super::fig11::{self, IMAGE_BYTES};
use super::held::Held;
use super::keeper::Keeper;
use super::linux::Linux;
use super::medium::Medium;
use super::rig::{self, Ground};
use super::setup::Setup;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::samples::wait_until;
use crate::bench::session::Session;
use crate::bench::stats::geometric_mean;
use crate::bench::sweep;
use crate::bench::work;
use crate::guard::guard;
use crate::interrupt;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vswapper-fig14";
const MEMORY_MIB: u64 = 256;
/// Memory that all guests share, for each of them. A guest at rest beside nine at work gets a 28th
/// of ten parts, which is just above Ebb's least limit.
const HOST_MIB_A_GUEST: u64 = 150;
/// Greatest part of the best baseline's time.
const GOAL: f64 = 0.9;
/// Guests in a quick run, and in a full one.
const GUESTS: [u64; 2] = [3, 10];
/// Weight of a guest at work; that of a guest at rest is 1.
const AT_WORK_WEIGHT: u64 = 3;
/// Least and greatest memory of a guest in the pool, in percent of its share. The least is about
/// what the other sides leave a guest at rest, and the greatest is all of its memory.
const POOL_PERCENT: [u64; 2] = [40, 171];
/// Longest wait for a guest: the guests share about two processors, beside the memory.
const PATIENCE: Duration = Duration::from_secs(1200);
const APART: Duration = Duration::from_secs(10);
/// Longest time for guests to come to rest within their limit.
const TO_REST: Duration = Duration::from_secs(240);
/// Time between two samples of all guests' memory: a sample takes some 60 ms of a processor.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const TIME: Metric = Metric::less("a job, geometric mean", "s", "job");
const LAST: Metric = Metric::less("the last job's end", "s", "all");

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs, or there is no Debian to run.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    report.note(Linux::lacks());
    let archive = assets::userland().map_err(anyhow::Error::msg)?;
    let directory = sweep::scratch()?;
    let image =
        rig::image(directory.path(), IMAGE_BYTES, |at| work::unpack_userland(&archive, at))?;
    let linux = fig11::screen_zstd(session, &mut report, &image)?;
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let guests = GUESTS[usize::from(!session.identity.quick)];
    let case = format!("{guests} guests, {} MiB", guests * HOST_MIB_A_GUEST);
    // This many guests take long, so there is only one way of Linux's.
    let linux = compare::best(&linux, 1);
    let sides = [&[Keeper::EbbPool], linux].concat();
    let context = (session, &mut blocks, &mut report);
    let taken = compare::take(context, &case, &sides, |keeper| {
        compare::again(keeper, || together(keeper, guests, &image))
    })?;
    report.note("`Ebb, pool` shares the memory by what it sees guests use, as Linux does.");
    compare::rows(&mut report, &taken, TIME, (Keeper::EbbPool, linux), Some(GOAL));
    compare::rows(&mut report, &taken, LAST, (Keeper::EbbPool, linux), None);
    compare::costs(&mut report, &taken, Keeper::EbbPool, linux);
    let title = format!(
        "{guests} guests of {MEMORY_MIB} MiB start a compressor 10 s apart and share {} MiB \
         (VSwapper, fig. 14)",
        guests * HOST_MIB_A_GUEST
    );
    let (title, y_label) = (title.as_str(), "seconds a job");
    report.plot(&Figure { title, x_label: "guest", y_label, panels: &[picture(&taken)] })?;
    Ok(report)
}

fn together(keeper: Keeper, guests: u64, image: &Path) -> anyhow::Result<Figures> {
    let (medium, host_mib) = (Medium::Ssd, guests * HOST_MIB_A_GUEST);
    let setup = Setup::new(keeper, medium, [MEMORY_MIB, host_mib], image);
    let ground = Ground::new(keeper, medium, [guests * MEMORY_MIB, host_mib])?;
    let booted = ground.boot_all(&setup, guests)?;
    let vms: Vec<&Vm> = booted.iter().map(|(vm, _)| vm).collect();
    vms.iter().for_each(|vm| vm.console().be_patient(PATIENCE));
    let manager = Manager { keeper, vms: &vms, at_work: Mutex::new(vec![false; vms.len()]) };
    rest(&ground, &manager)?;
    let mut figures = Figures::new();
    let all = compare::counted_on(&mut figures, (&ground, &vms, MEMORY_MIB), || {
        let began = Instant::now();
        let look = || ground.look(&vms, MEMORY_MIB);
        let (seconds, held) = Held::during(LOOK_EVERY, look, || jobs(&manager, began))?;
        Ok((seconds, held, began.elapsed()))
    })?;
    let (seconds, held, all) = all;
    held.add_to(&mut figures, Some(host_mib));
    compare::add(&mut figures, "job", geometric_mean(&seconds));
    compare::add(&mut figures, "all", all.as_secs_f64());
    figures.insert("course".into(), seconds);
    Ok(figures)
}

/// Waits until all guests together are within their limit, on all sides, before the first job
/// begins.
fn rest(ground: &Ground, manager: &Manager<'_>) -> anyhow::Result<()> {
    let (vms, end) = (manager.vms, Instant::now() + TO_REST);
    manager.begin();
    let of_kernel = manager.keeper.cgroup_limit(manager.host_mib(), MEMORY_MIB * vms.len() as u64);
    ground.limit(of_kernel)?;
    loop {
        interrupt::check()?;
        let has = ground.look(vms, MEMORY_MIB)?.guests;
        if has <= manager.host_mib() as f64 {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{has:.0} MiB of {} are taken at rest", manager.host_mib());
        thread::sleep(Duration::from_millis(500));
    }
}

/// Runs a job in each guest. Returns how long each took.
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

/// Gives guests their parts of the host's memory: those at work get more than those at rest.
struct Manager<'a> {
    keeper: Keeper,
    vms: &'a [&'a Vm],
    at_work: Mutex<Vec<bool>>,
}

impl Manager<'_> {
    fn host_mib(&self) -> u64 {
        self.vms.len() as u64 * HOST_MIB_A_GUEST
    }

    fn begin(&self) {
        match self.keeper {
            Keeper::EbbPool => self.pool(),
            _ => self.share(&vec![false; self.vms.len()]),
        }
    }

    /// Gives all guests the same share; each may have what others do not use of theirs.
    fn pool(&self) {
        let [lower, upper] = POOL_PERCENT;
        for (place, vm) in self.vms.iter().enumerate() {
            if place == 0 {
                vm.host().ebb(&format!("pool {}M", self.host_mib())).ok();
            }
            let share = format!("share {HOST_MIB_A_GUEST}M --lower {lower} --upper {upper}");
            vm.ebb(&share).ok();
        }
    }

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
        if self.keeper != Keeper::EbbPool {
            self.share(&all);
        }
    }

    fn share(&self, all: &[bool]) {
        let weight = |at_work: bool| if at_work { AT_WORK_WEIGHT } else { 1 };
        let sum: u64 = all.iter().copied().map(weight).sum();
        let parts = all.iter().map(|at_work| self.host_mib() * weight(*at_work) / sum);
        let mut parts: Vec<_> = self.vms.iter().zip(parts).collect();
        // Guests that must give memory come first.
        parts.sort_by_key(|(_, part)| *part);
        for (vm, part) in parts {
            self.keeper.share(vm, part.min(MEMORY_MIB), MEMORY_MIB);
        }
    }
}

/// Returns a picture of the last block.
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
