//! Figures 5 and 11: a compressor with eight threads in a guest that has less and less of
//! the 512 MB that it believes to have.

use std::path::Path;

use vmtest::assets;

use super::medium::Medium;
use super::rig::{self, Keeper, Rig, Setup};
use super::work;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 512;
const IMAGE_BYTES: u64 = 1536 << 20;
/// Of the balloon's time, where its guest survives.
const GOAL: f64 = 1.1;
/// What became of one run.
struct Run {
    keeper: Keeper,
    limit_mib: u64,
    /// None: the guest's kernel or the host's killed what it needed.
    seconds: Rounds,
    killed: usize,
}

/// Runs it.
///
/// # Errors
/// The host lacks what it needs, or there is no Debian to run.
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("vswapper-fig11");
    let archive = assets::userland().map_err(anyhow::Error::msg)?;
    let directory = tempfile::Builder::new().prefix("ebb-bench-").tempdir()?;
    let image =
        rig::image(directory.path(), IMAGE_BYTES, |at| work::unpack_userland(&archive, at))?;
    let (rounds, limits): (_, &[u64]) = match quick {
        true => (1, &[384, 192]),
        false => (3, &[512, 384, 256, 224, 192]),
    };
    let mut runs = Vec::new();
    for &limit_mib in limits {
        for keeper in [Keeper::Anonymous, Keeper::Balloon, Keeper::Ebb, Keeper::EbbBalloon] {
            let mut run = Run { keeper, limit_mib, seconds: Rounds::default(), killed: 0 };
            for _ in 0..rounds {
                match one(keeper, limit_mib, &image) {
                    Ok(seconds) => run.seconds.push(seconds),
                    Err(_) => run.killed += 1,
                }
            }
            runs.push(run);
        }
        rows(&mut report, limit_mib, &runs);
    }
    let title = "zstd with 8 threads in a guest of 512 MB (VSwapper, fig. 11)";
    let y_label = "seconds";
    report.plot(&Figure { title, x_label: "MiB", y_label, panels: &[picture(&runs)] })?;
    Ok(report)
}

fn one(keeper: Keeper, limit_mib: u64, image: &Path) -> anyhow::Result<f64> {
    let medium = Medium::Ssd;
    let setup = Setup { keeper, medium, memory_mib: MEMORY_MIB, limit_mib, cpus: 1, image };
    crate::guard::guard(|| {
        let rig = Rig::start(&setup)?;
        let seconds = work::seconds(&rig.vm, &format!("program /mnt {}", work::COMPRESS));
        rig.vm.forgive();
        seconds
    })
}

fn rows(report: &mut Report, limit_mib: u64, runs: &[Run]) {
    let runs = || runs.iter().filter(|run| run.limit_mib == limit_mib);
    for run in runs().filter(|run| run.killed > 0) {
        let (name, killed) = (run.keeper.name(), run.killed);
        report.note(format!("{limit_mib} MiB, {name}: {killed} times it was killed."));
    }
    for ebb in runs().filter(|run| matches!(run.keeper, Keeper::Ebb | Keeper::EbbBalloon)) {
        for other in runs().filter(|run| matches!(run.keeper, Keeper::Anonymous | Keeper::Balloon))
        {
            let what = format!("{limit_mib} MiB: {}", ebb.keeper.name());
            let row = Row::new(what, "s", &ebb.seconds);
            let row = row.against(other.keeper.name(), &other.seconds);
            let is_goal = ebb.keeper == Keeper::Ebb && other.keeper == Keeper::Balloon;
            let survives = other.killed == 0;
            report.row(if is_goal && survives { row.at_most(GOAL) } else { row });
        }
    }
}

fn picture(runs: &[Run]) -> Panel {
    let series = |keeper: Keeper| {
        let of = runs.iter().filter(|run| run.keeper == keeper && run.killed == 0);
        let points = of.map(|run| (run.limit_mib as f64, run.seconds.median())).collect();
        Series { name: keeper.name().into(), points, is_bound: false }
    };
    let keepers = [Keeper::Anonymous, Keeper::Balloon, Keeper::Ebb, Keeper::EbbBalloon];
    Panel { series: keepers.map(series).into(), ..Panel::default() }
}
