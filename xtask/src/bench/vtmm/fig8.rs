//! Figure 8: VMs with unlike needs, each on an island of its own, and in a pool together.

use std::time::{Duration, Instant};

use ebb_api::{PoolMember, PoolStatus};
use vmtest::{Guest, Vm};

use super::fault;
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::samples::wait_until;
use crate::bench::session::Session;
use crate::bench::swap::keeper::Keeper;
use crate::bench::swap::medium::Medium;
use crate::bench::swap::rig::Ground;
use crate::plot::{Figure, Panel, Series};

const MIB: u64 = 1 << 20;
const MEMORY_MIB: u64 = 320;
const SHARE_MIB: u64 = 160;
/// What each VM's program works with.
const PROGRAMS_MIB: [u64; 4] = [20, 60, 200, 200];
/// The part of it that gets nine accesses of ten.
const HOT_PERCENT: u64 = 70;
/// The pool of the paper's limits, and one in which nobody gives or takes.
const WAYS: [Way; 2] =
    [Way { name: "island", limits: [100, 100] }, Way { name: "pool", limits: [75, 125] }];
const GOAL: f64 = 1.12;
/// Limits that did not change for so long are those that will stay.
const STEADY: Duration = Duration::from_secs(20);
/// From one monitoring to the next it takes a minute, and longer where little moves.
const STEADY_MOST: Duration = Duration::from_secs(240);

#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// In percent of the share.
    limits: [u32; 2],
}

/// How often each way is taken, and how long it is looked at.
struct Scale {
    rounds: usize,
    slice: Duration,
    slices: u32,
}

const FULL: Scale = Scale { rounds: 3, slice: Duration::from_secs(10), slices: 6 };
const QUICK: Scale = Scale { rounds: 1, slice: Duration::from_secs(5), slices: 3 };

/// What all VMs managed in one way.
#[derive(Default)]
struct Run {
    limits_mib: [Rounds; PROGRAMS_MIB.len()],
    /// The hot sets that the pool was told of.
    hot_mib: [Rounds; PROGRAMS_MIB.len()],
    /// Of each slice and VM, accesses a second.
    course: Vec<[f64; PROGRAMS_MIB.len()]>,
}

/// Runs it.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("vtmm-fig8");
    let scale = if quick { QUICK } else { FULL };
    report.note(format!(
        "Four VMs of {MEMORY_MIB} MiB with a share of {SHARE_MIB} each; in them programs access \
         {PROGRAMS_MIB:?} MiB at random, 90 % of the time {HOT_PERCENT} % of them. The rest is in a \
         swap file on a loop device with direct I/O on this machine's disk. Island: nobody gives or \
         takes; pool: {:?} % of the share. All: the mean of the VMs' speeds, each as a part of its \
         island's; {} rounds.",
        WAYS[1].limits, scale.rounds
    ));
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
    let mut runs = WAYS.map(|_| Run::default());
    for _ in 0..scale.rounds {
        for (way, run) in WAYS.iter().zip(&mut runs) {
            run.round(*way, &vms, &scale)?;
        }
    }
    for vm in &vms {
        let stopped = vm.guest("accessstop noise");
        anyhow::ensure!(stopped.ends_with(" 0"), "wrong bytes: {stopped}");
    }
    rows(&mut report, &runs);
    plot(&report, &runs, &scale)?;
    Ok(report)
}

/// Its tracker sees uses only where page tables are loaded again and again.
fn guest() -> Guest {
    Guest::debian("6.1-cloud")
        .append("pti=on transparent_hugepage=never")
        .memory(&format!("{MEMORY_MIB}M"))
        .backing("small")
        .cpus(1)
}

impl Run {
    fn speeds(&self, vm: usize) -> Rounds {
        self.course.iter().map(|speeds| speeds[vm]).collect()
    }

    fn round(&mut self, way: Way, vms: &[Vm], scale: &Scale) -> anyhow::Result<()> {
        let [lower, upper] = way.limits;
        for vm in vms {
            vm.ebb(&format!("share {SHARE_MIB}M --lower {lower} --upper {upper}")).ok();
        }
        for vm in vms {
            // Of before its program began nothing is to count.
            vm.ebb("heat --fresh --json").ok();
        }
        let members = wait_steady(&vms[0])?;
        for (index, member) in members.iter().enumerate() {
            self.limits_mib[index].push(limit_bytes(member) as f64 / MIB as f64);
            self.hot_mib[index].push(member.hot_bytes.unwrap_or(0) as f64 / MIB as f64);
        }
        for _ in 0..scale.slices {
            let before = so_far(vms)?;
            wait_until(Instant::now() + scale.slice)?;
            let after = so_far(vms)?;
            let mut speeds = [0.0; PROGRAMS_MIB.len()];
            for (speed, (before, after)) in speeds.iter_mut().zip(before.into_iter().zip(after)) {
                *speed = (after.0 - before.0) / (after.1 - before.1);
            }
            self.course.push(speeds);
        }
        Ok(())
    }
}

/// Of each VM, as [`fault::so_far`].
fn so_far(vms: &[Vm]) -> anyhow::Result<Vec<(f64, f64)>> {
    vms.iter().map(|vm| fault::so_far(vm, "noise")).collect()
}

/// Waits until the pool has given what it gives.
fn wait_steady(vm: &Vm) -> anyhow::Result<Vec<PoolMember>> {
    let look = || -> anyhow::Result<PoolStatus> {
        Ok(serde_json::from_str(&vm.host().ebb("pool --json").ok())?)
    };
    let limits = |pool: &PoolStatus| -> Vec<u64> { pool.vms.iter().map(limit_bytes).collect() };
    let end = Instant::now() + STEADY_MOST;
    let (mut last, mut since) = (look()?, Instant::now());
    while last.vms.iter().any(|vm| vm.hot_bytes.is_none()) || since.elapsed() < STEADY {
        anyhow::ensure!(Instant::now() < end, "the pool does not come to rest: {last:?}");
        wait_until(Instant::now() + Duration::from_secs(1))?;
        let now = look()?;
        if limits(&now) != limits(&last) {
            since = Instant::now();
        }
        last = now;
    }
    Ok(last.vms)
}

fn limit_bytes(member: &PoolMember) -> u64 {
    member.limit_bytes.unwrap_or(MEMORY_MIB * MIB)
}

fn rows(report: &mut Report, [island, pool]: &[Run; 2]) {
    let names = PROGRAMS_MIB.iter().zip('a'..).map(|(mib, vm)| format!("{vm}, {mib} MiB"));
    for (index, name) in names.enumerate() {
        let row = |what: &str, unit, of: &dyn Fn(&Run) -> Rounds| {
            Row::new(format!("{name}: {what}"), unit, &of(pool)).against("island", &of(island))
        };
        report.row(row("accesses", "/s", &|run| run.speeds(index)));
        report.row(row("limit", "MiB", &|run| run.limits_mib[index].clone()));
        report.row(row("hot set found", "MiB", &|run| run.hot_mib[index].clone()));
    }
    let alone: Vec<f64> =
        (0..PROGRAMS_MIB.len()).map(|index| island.speeds(index).median()).collect();
    let overall = |run: &Run| -> Rounds {
        let slices = run.course.iter();
        let parts = slices.map(|speeds| {
            let each = speeds.iter().zip(&alone);
            each.map(|(speed, alone)| speed / alone).sum::<f64>() / speeds.len() as f64
        });
        parts.collect()
    };
    let row = Row::new("all", "of island", &overall(pool)).against("island", &overall(island));
    report.row(row.at_least(GOAL));
}

fn plot(report: &Report, runs: &[Run; 2], scale: &Scale) -> anyhow::Result<()> {
    let panels: Vec<Panel> = PROGRAMS_MIB
        .iter()
        .enumerate()
        .map(|(index, mib)| Panel {
            title: format!("{mib} MiB"),
            series: WAYS
                .iter()
                .zip(runs)
                .map(|(way, run)| Series {
                    name: way.name.into(),
                    points: (1..)
                        .zip(&run.course)
                        .map(|(n, speeds)| {
                            (f64::from(n) * scale.slice.as_secs_f64(), speeds[index])
                        })
                        .collect(),
                    is_bound: false,
                })
                .collect(),
            ..Panel::default()
        })
        .collect();
    let title = "Four VMs on islands and in a pool (vTMM, fig. 8)";
    report.plot(&Figure { title, x_label: "s", y_label: "accesses/s", panels: &panels })
}
