//! Figure 8: VMs with unlike needs, each on an island of its own, and in a pool together.

use std::time::{Duration, Instant};

use ebb_api::PoolStatus;
use vmtest::{Guest, Vm};

use super::fault;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::samples::wait_until;
use crate::bench::swap::medium::Medium;
use crate::bench::swap::rig::{Ground, Keeper};
use crate::plot::{Figure, Panel, Series};

const MIB: u64 = 1 << 20;
const MEMORY_MIB: u64 = 320;
const PROGRAM_MIB: u64 = 200;
const SHARE_MIB: u64 = 160;
/// Of each VM's program, the part that gets nine accesses of ten.
const HOT_PERCENTS: [u64; 4] = [5, 20, 60, 60];
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
    limits_mib: [Rounds; HOT_PERCENTS.len()],
    /// Of each slice and VM, accesses a second.
    course: Vec<[f64; HOT_PERCENTS.len()]>,
}

/// Runs it.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("vtmm-fig8");
    let scale = if quick { QUICK } else { FULL };
    report.note(format!(
        "Four VMs of {MEMORY_MIB} MiB with a share of {SHARE_MIB} each; in each a program accesses \
         {PROGRAM_MIB} MiB at random, 90 % of the time {HOT_PERCENTS:?} % of them. The rest is in a \
         swap file on a loop device with direct I/O on this machine's disk. Island: nobody gives or \
         takes; pool: {:?} % of the share. All: the mean of the VMs' speeds, each as a part of its \
         island's; {} rounds.",
        WAYS[1].limits, scale.rounds
    ));
    let ground = Ground::new(Keeper::Ebb, Medium::Ssd)?;
    let vms: Vec<Vm> =
        HOT_PERCENTS.iter().map(|_| ground.run(guest())).collect::<Result<_, _>>()?;
    for (vm, percent) in vms.iter().zip(HOT_PERCENTS) {
        vm.wait_trusted();
        let pages = (PROGRAM_MIB * MIB) / ebb_units::FRAME_BYTES;
        vm.guest(&format!("access noise {PROGRAM_MIB}M hot 0 {}", pages * percent / 100));
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
        let limits = wait_steady(&vms[0])?;
        for (rounds, limit) in self.limits_mib.iter_mut().zip(limits) {
            rounds.push(limit as f64 / MIB as f64);
        }
        for _ in 0..scale.slices {
            let before = so_far(vms)?;
            wait_until(Instant::now() + scale.slice)?;
            let after = so_far(vms)?;
            let mut speeds = [0.0; HOT_PERCENTS.len()];
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

/// Waits until the pool has given what it gives: each VM's limit.
fn wait_steady(vm: &Vm) -> anyhow::Result<Vec<u64>> {
    let limits = || -> anyhow::Result<Option<Vec<u64>>> {
        let pool: PoolStatus = serde_json::from_str(&vm.host().ebb("pool --json").ok())?;
        let known = pool.vms.iter().all(|vm| vm.hot_bytes.is_some());
        let limits = pool.vms.iter().map(|vm| vm.limit_bytes.unwrap_or(MEMORY_MIB * MIB));
        Ok(known.then(|| limits.collect()))
    };
    let end = Instant::now() + STEADY_MOST;
    let (mut last, mut since) = (limits()?, Instant::now());
    while last.is_none() || since.elapsed() < STEADY {
        anyhow::ensure!(Instant::now() < end, "the pool does not come to rest: {last:?}");
        wait_until(Instant::now() + Duration::from_secs(1))?;
        let now = limits()?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last.unwrap_or_default())
}

fn rows(report: &mut Report, [island, pool]: &[Run; 2]) {
    let names =
        HOT_PERCENTS.iter().zip('a'..).map(|(percent, vm)| format!("{vm}, {percent} % hot"));
    for (index, name) in names.enumerate() {
        let row = |what: &str, unit, of: &dyn Fn(&Run) -> Rounds| {
            Row::new(format!("{name}: {what}"), unit, &of(pool)).against("island", &of(island))
        };
        report.row(row("accesses", "/s", &|run| run.speeds(index)));
        report.row(row("limit", "MiB", &|run| run.limits_mib[index].clone()));
    }
    let alone: Vec<f64> =
        (0..HOT_PERCENTS.len()).map(|index| island.speeds(index).median()).collect();
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
    let panels: Vec<Panel> = HOT_PERCENTS
        .iter()
        .enumerate()
        .map(|(index, percent)| Panel {
            title: format!("{percent} % hot"),
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
    report.plot(&Figure { title, x_label: "s", y_label: "accesses/s", panels: &panels }).map(drop)
}
