//! Figures 5 and 11: a compressor with eight threads, and a compiler, in a guest that has
//! less and less of the 512 MB that it believes to have.

use std::path::Path;

use vmtest::{Scratch, assets};

use super::medium::Medium;
use super::rig::{self, Keeper, Rig, Setup};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 512;
const IMAGE_BYTES: u64 = 1536 << 20;
/// Of the balloon's time, where its guest survives.
const GOAL: f64 = 1.1;
const WORKS: [(&str, &str); 2] = [("zstd", work::COMPRESS), ("a compile", work::COMPILE)];
const KEEPERS: [Keeper; 4] = [Keeper::Anonymous, Keeper::Balloon, Keeper::Ebb, Keeper::EbbBalloon];

/// What became of one kind of run.
struct Run {
    /// Of [`WORKS`].
    work: usize,
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
    let directory = Scratch::new("ebb-bench-")?;
    let image =
        rig::image(directory.path(), IMAGE_BYTES, |at| work::unpack_userland(&archive, at))?;
    let (rounds, limits): (_, &[u64]) = match quick {
        true => (1, &[192]),
        false => (3, &[512, 384, 256, 224, 192]),
    };
    let mut runs = Vec::new();
    for (work, &limit_mib) in
        (0..WORKS.len()).flat_map(|work| limits.iter().map(move |l| (work, l)))
    {
        for keeper in KEEPERS {
            let mut run = Run { work, keeper, limit_mib, seconds: Rounds::default(), killed: 0 };
            for _ in 0..rounds {
                match one(work, keeper, limit_mib, &image)? {
                    Some(seconds) => run.seconds.push(seconds),
                    None => run.killed += 1,
                }
            }
            runs.push(run);
        }
        rows(&mut report, work, limit_mib, &runs);
    }
    let title = "Work in a guest of 512 MB that has less (VSwapper, fig. 11)";
    let panels = [picture(0, &runs), picture(1, &runs)];
    report.plot(&Figure { title, x_label: "MiB", y_label: "seconds", panels: &panels })?;
    Ok(report)
}

/// Seconds; none: for want of memory a kernel killed what it needed.
fn one(work: usize, keeper: Keeper, limit_mib: u64, image: &Path) -> anyhow::Result<Option<f64>> {
    let medium = Medium::Ssd;
    let setup = Setup::new(keeper, medium, [MEMORY_MIB, limit_mib], image);
    let seconds = crate::guard::guard(|| {
        let rig = Rig::start(&setup)?;
        let seconds = work::seconds(&rig.vm, &format!("program /mnt {}", WORKS[work].1));
        rig.vm.forgive();
        seconds
    });
    match seconds {
        Err(error) if work::was_killed(&error) => Ok(None),
        seconds => seconds.map(Some),
    }
}

fn rows(report: &mut Report, work: usize, limit_mib: u64, runs: &[Run]) {
    let name = WORKS[work].0;
    let runs = || runs.iter().filter(|run| (run.work, run.limit_mib) == (work, limit_mib));
    for run in runs().filter(|run| run.killed > 0) {
        let (keeper, killed) = (run.keeper.name(), run.killed);
        report.note(format!("{name}, {limit_mib} MiB, {keeper}: {killed} times it was killed."));
    }
    for ebb in runs().filter(|run| matches!(run.keeper, Keeper::Ebb | Keeper::EbbBalloon)) {
        for other in runs().filter(|run| matches!(run.keeper, Keeper::Anonymous | Keeper::Balloon))
        {
            let what = format!("{name}, {limit_mib} MiB: {}", ebb.keeper.name());
            let row = Row::new(what, "s", &ebb.seconds);
            let row = row.against(other.keeper.name(), &other.seconds);
            let is_goal = ebb.keeper == Keeper::Ebb && other.keeper == Keeper::Balloon;
            let survives = other.killed == 0;
            report.row(if is_goal && survives { row.at_most(GOAL) } else { row });
        }
    }
}

fn picture(work: usize, runs: &[Run]) -> Panel {
    let series = |keeper: Keeper| {
        let of = runs.iter();
        let of = of.filter(|run| (run.work, run.keeper, run.killed) == (work, keeper, 0));
        let points = of.map(|run| (run.limit_mib as f64, run.seconds.median())).collect();
        Series { name: keeper.name().into(), points, is_bound: false }
    };
    Panel { title: WORKS[work].0.into(), series: KEEPERS.map(series).into(), ..Panel::default() }
}
