//! Figure 8: VMs with unlike needs, each on an island of its own, and in a pool together.

use std::time::{Duration, Instant};

use ebb_api::{PoolMember, PoolStatus};
use vmtest::{Guest, Vm};

use super::fault;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::samples::wait_until;
use crate::bench::session::Session;
use crate::bench::stats;
use crate::bench::swap::keeper::Keeper;
use crate::bench::swap::medium::Medium;
use crate::bench::swap::rig::Ground;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vtmm-fig8";
/// Name of the side of a block: a set of four VMs.
const SET: &str = "Ebb";
/// Name of a set's figure: the mean over its VMs of the speed in the pool, as a ratio to that on
/// the island.
const OVERALL: &str = "overall";
const MIB: u64 = 1 << 20;
const MEMORY_MIB: u64 = 320;
const SHARE_MIB: u64 = 160;
/// Memory that each VM's program uses.
const PROGRAMS_MIB: [u64; 4] = [20, 60, 200, 200];
/// Percent of that memory that gets nine accesses of ten.
const HOT_PERCENT: u64 = 70;
/// An island, in which nobody gives or takes, and a pool with the paper's limits.
const SETUPS: [Setup; 2] =
    [Setup { name: "island", limits: [100, 100] }, Setup { name: "pool", limits: [75, 125] }];
const GOAL: f64 = 1.12;
/// Time after which limits count as stable that have moved by less than [`STILL_MIB`].
const STEADY: Duration = Duration::from_secs(20);
/// Smaller moves come from looks that find slightly different hot sets.
const STILL_MIB: u64 = 2;
/// Longest wait for stable limits. A monitoring comes once a minute, or less often where little
/// moves.
const STEADY_MOST: Duration = Duration::from_secs(240);

#[derive(Clone, Copy)]
struct Setup {
    name: &'static str,
    /// Least and greatest limit, in percent of the share.
    limits: [u32; 2],
}

/// Number of sets of VMs, and how long each setup is measured.
struct Scale {
    sets: usize,
    slice: Duration,
    slices: u32,
}

const FULL: Scale = Scale { sets: 5, slice: Duration::from_secs(10), slices: 4 };
const QUICK: Scale = Scale { sets: 1, slice: Duration::from_secs(5), slices: 3 };

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let scale = if session.identity.quick { QUICK } else { FULL };
    report.note(format!(
        "Four VMs of {MEMORY_MIB} MiB with a share of {SHARE_MIB} each; in them programs access \
         {PROGRAMS_MIB:?} MiB at random, 90 % of the time {HOT_PERCENT} % of them. The rest is in a \
         swap file on a loop device with direct I/O on this machine's disk. Island: nobody gives or \
         takes; pool: {:?} % of the share. All: the mean of the VMs' speeds, each as a part of its \
         island's; {} sets of VMs, each in both setups, in any order.",
        SETUPS[1].limits, scale.sets
    ));
    let mut order = stats::order(blocks.seed(), NAME);
    let sides = (&[()][..], |()| SET.to_owned());
    let taken = blocks.take(&mut report, "four VMs", sides, scale.sets, |()| {
        let mut setups = SETUPS;
        order.shuffle(&mut setups);
        set(&setups, &scale)
    })?;
    rows(&mut report, &taken);
    plot(&report, &taken, &scale)?;
    Ok(report)
}

fn set(setups: &[Setup], scale: &Scale) -> anyhow::Result<Figures> {
    let all = [MEMORY_MIB, SHARE_MIB].map(|mib| mib * PROGRAMS_MIB.len() as u64);
    let ground = Ground::new(Keeper::Ebb, Medium::Ssd, all)?;
    let vms: Vec<Vm> =
        PROGRAMS_MIB.iter().map(|_| ground.run(guest())).collect::<Result<_, _>>()?;
    for (vm, mib) in vms.iter().zip(PROGRAMS_MIB) {
        vm.wait_trusted();
        let hot = mib * MIB / ebb_units::FRAME_BYTES * HOT_PERCENT / 100;
        vm.guest(&format!("access noise {mib}M hot 0 {hot}"));
    }
    vms[0].host().ebb(&format!("pool {}M", SHARE_MIB * vms.len() as u64)).ok();
    let mut figures = Figures::new();
    setups.iter().try_for_each(|setup| round(&mut figures, *setup, &vms, scale))?;
    for vm in &vms {
        let stopped = vm.guest("accessstop noise");
        anyhow::ensure!(stopped.ends_with(" 0"), "wrong bytes: {stopped}");
    }
    let part = |vm: usize| {
        let speed = |setup: Setup| {
            figures.get(&setup.figure("speed", vm)).map_or(f64::NAN, |all| mean(all))
        };
        speed(SETUPS[1]) / speed(SETUPS[0])
    };
    let overall = mean(&(0..PROGRAMS_MIB.len()).map(part).collect::<Vec<f64>>());
    add(&mut figures, OVERALL, overall);
    Ok(figures)
}

fn mean(figures: &[f64]) -> f64 {
    figures.iter().sum::<f64>() / figures.len() as f64
}

impl Setup {
    /// Returns the name of a set's figure of a VM.
    fn figure(self, what: &str, vm: usize) -> String {
        format!("{}, {what}, {vm}", self.name)
    }
}

fn round(figures: &mut Figures, setup: Setup, vms: &[Vm], scale: &Scale) -> anyhow::Result<()> {
    let [lower, upper] = setup.limits;
    for vm in vms {
        vm.ebb(&format!("share {SHARE_MIB}M --lower {lower} --upper {upper}")).ok();
    }
    for vm in vms {
        // Uses from before its program began must not count.
        vm.ebb("heat --fresh --json").ok();
    }
    for (index, member) in wait_steady(&vms[0])?.iter().enumerate() {
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        add(figures, &setup.figure("limit", index), mib(limit_bytes(member)));
        add(figures, &setup.figure("hot", index), mib(member.hot_bytes.unwrap_or(0)));
    }
    for _ in 0..scale.slices {
        let before = so_far(vms)?;
        wait_until(Instant::now() + scale.slice)?;
        for (index, (before, after)) in before.into_iter().zip(so_far(vms)?).enumerate() {
            let speed = (after.0 - before.0) / (after.1 - before.1);
            add(figures, &setup.figure("speed", index), speed);
        }
    }
    Ok(())
}

/// Makes a guest with `pti=on`, because the tracker sees uses only if page tables are loaded again
/// and again.
fn guest() -> Guest {
    Guest::debian("6.1-cloud")
        .append("pti=on transparent_hugepage=never")
        .memory(&format!("{MEMORY_MIB}M"))
        .backing("small")
        .cpus(1)
}

/// Returns [`fault::so_far`] of each VM.
fn so_far(vms: &[Vm]) -> anyhow::Result<Vec<(f64, f64)>> {
    vms.iter().map(|vm| fault::so_far(vm, "noise")).collect()
}

/// Waits until the pool's limits are stable.
fn wait_steady(vm: &Vm) -> anyhow::Result<Vec<PoolMember>> {
    let look = || -> anyhow::Result<PoolStatus> {
        Ok(serde_json::from_str(&vm.host().ebb("pool --json").ok())?)
    };
    let limits = |pool: &PoolStatus| -> Vec<u64> { pool.vms.iter().map(limit_bytes).collect() };
    let end = Instant::now() + STEADY_MOST;
    let (mut last, mut since) = (look()?, Instant::now());
    let mut at_rest = limits(&last);
    while last.vms.iter().any(|vm| vm.hot_bytes.is_none()) || since.elapsed() < STEADY {
        anyhow::ensure!(Instant::now() < end, "the pool does not come to rest: {last:?}");
        wait_until(Instant::now() + Duration::from_secs(1))?;
        last = look()?;
        let now = limits(&last);
        let is_still = |(now, then): (&u64, &u64)| now.abs_diff(*then) < STILL_MIB * MIB;
        if now.len() != at_rest.len() || !now.iter().zip(&at_rest).all(is_still) {
            (at_rest, since) = (now, Instant::now());
        }
    }
    Ok(last.vms)
}

fn limit_bytes(member: &PoolMember) -> u64 {
    member.limit_bytes.unwrap_or(MEMORY_MIB * MIB)
}

/// Adds the rows. A set's figure of several slices is their median.
fn rows(report: &mut Report, taken: &Taken) {
    let names = PROGRAMS_MIB.iter().zip('a'..).map(|(mib, vm)| format!("{vm}, {mib} MiB"));
    for (index, name) in names.enumerate() {
        for (what, unit, figure) in [
            ("accesses", "/s", "speed"),
            ("limit", "MiB", "limit"),
            ("hot set found", "MiB", "hot"),
        ] {
            let [island, pool] =
                SETUPS.map(|setup| taken.rounds(SET, &setup.figure(figure, index)));
            let row = Row::new(format!("{name}: {what}"), unit, &pool).failed(taken.failed());
            report.row(row.against_vms("island", &island));
        }
    }
    let all = taken.rounds(SET, OVERALL);
    let island: Rounds = all.figures().iter().map(|_| 1.0).collect();
    let row = Row::new("all", "of island", &all).failed(taken.failed());
    report.row(row.against_vms("island", &island).at_least(GOAL));
}

/// Draws the last set.
fn plot(report: &Report, taken: &Taken, scale: &Scale) -> anyhow::Result<()> {
    let seconds = scale.slice.as_secs_f64();
    let series = |setup: Setup, vm: usize| Series {
        name: setup.name.into(),
        points: (1..)
            .zip(taken.course(SET, &setup.figure("speed", vm)))
            .map(|(slice, speed)| (f64::from(slice) * seconds, speed))
            .collect(),
        is_bound: false,
    };
    let panel = |(vm, mib): (usize, &u64)| Panel {
        title: format!("{mib} MiB"),
        series: SETUPS.iter().map(|setup| series(*setup, vm)).collect(),
        ..Panel::default()
    };
    let panels: Vec<Panel> = PROGRAMS_MIB.iter().enumerate().map(panel).collect();
    let title = "Four VMs on islands and in a pool (vTMM, fig. 8)";
    report.plot(&Figure { title, x_label: "s", y_label: "accesses/s", panels: &panels })
}
