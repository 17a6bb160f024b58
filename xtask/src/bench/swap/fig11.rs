//! Figures 11 and 12: a compressor with eight threads, or a compiler, in a guest that has less and
//! less of the 512 MB that it believes to have.

use std::path::Path;

use vmtest::assets;

use super::compare::{self, Metric, Screening};
use super::keeper::{Keeper, PLAIN_LINUX};
use super::linux::Linux;
use super::medium::Medium;
use super::rig::{self, Rig};
use super::setup::Setup;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::session::Session;
use crate::bench::sweep;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 512;
pub const IMAGE_BYTES: u64 = 1536 << 20;
/// Memory of a guest in a quick run.
const QUICK_MIB: u64 = 192;
/// Memory of a guest in the screening, and in the second screening of the best ways.
const SCREENED_MIB: [u64; 2] = [192, 128];
/// Name of the file of the compressor's screening, which figure 14 shares.
const SCREENING: &str = "swap-screening-zstd";
const TIME: Metric = Metric::less("time", "s", "seconds");

/// The guest's work.
#[derive(Clone, Copy)]
struct Work {
    bench: &'static str,
    name: &'static str,
    command: &'static str,
    /// Greatest part of the best baseline's time.
    goal: f64,
}

const ZSTD: Work =
    Work { bench: "vswapper-fig11", name: "zstd", command: work::COMPRESS, goal: 0.9 };
const COMPILE: Work =
    Work { bench: "vswapper-fig12", name: "a compile", command: work::COMPILE, goal: 1.0 };
/// Cases: memory in MiB, number of processors, and how many of Linux's screened ways to compare
/// with.
const CASES: [(u64, u32, usize); 5] =
    [(MEMORY_MIB, 1, 0), (256, 1, 2), (192, 1, 2), (128, 1, 2), (192, 2, 1)];

/// Runs the compressor.
///
/// # Errors
/// The host lacks what it needs, or there is no Debian to run.
pub fn zstd(session: &Session) -> anyhow::Result<Report> {
    run(session, ZSTD)
}

/// Runs the compiler, against the ways that were the best for the compressor.
///
/// # Errors
/// Those of [`zstd`].
pub fn compile(session: &Session) -> anyhow::Result<Report> {
    run(session, COMPILE)
}

fn run(session: &Session, work: Work) -> anyhow::Result<Report> {
    let mut report = Report::new(work.bench);
    report.note(Linux::lacks());
    let mut blocks = Blocks::open(session, work.bench)?;
    report.seeded(blocks.seed());
    let archive = assets::userland().map_err(anyhow::Error::msg)?;
    let directory = sweep::scratch()?;
    let image =
        rig::image(directory.path(), IMAGE_BYTES, |at| work::unpack_userland(&archive, at))?;
    let screened = screen_zstd(session, &mut report, &image)?;
    let mut all = Vec::new();
    let quick = &[(QUICK_MIB, 1, 2)][..];
    let cases = if session.identity.quick { quick } else { &CASES };
    for &(limit_mib, cpus, ways) in cases {
        let linux = match limit_mib {
            // With all its memory, a guest is not swapped.
            MEMORY_MIB => &PLAIN_LINUX,
            _ => compare::best(&screened, ways),
        };
        let sides = [&[Keeper::Ebb], linux].concat();
        let context = (session, &mut blocks, &mut report);
        let case = case(work.name, limit_mib, cpus);
        let taken = compare::take(context, &case, &sides, |keeper| {
            compare::again(keeper, || one(keeper, work.command, [limit_mib, cpus.into()], &image))
        })?;
        compare::rows(&mut report, &taken, TIME, (Keeper::Ebb, linux), Some(work.goal));
        compare::costs(&mut report, &taken, Keeper::Ebb, linux);
        all.extend((cpus == 1).then_some((limit_mib, taken)));
    }
    let panels = &[picture(work, &all)];
    let title = "Work in a guest of 512 MB that has less (VSwapper, figs. 11 and 12)";
    report.plot(&Figure { title, x_label: "MiB", y_label: "seconds", panels })?;
    Ok(report)
}

/// Screens Linux's ways for guests that compress. The balloon is only told here, because the
/// guest's own kernel may kill the compressor for it.
///
/// # Errors
/// Those of [`compare::screen`].
pub fn screen_zstd(
    session: &Session,
    report: &mut Report,
    image: &Path,
) -> anyhow::Result<Vec<Keeper>> {
    let mut blocks = Blocks::open(session, SCREENING)?;
    let beside = [Keeper::Balloon, Keeper::EbbBalloon, Keeper::EbbCompressed];
    let [first, second] = SCREENED_MIB.map(|mib| case(ZSTD.name, mib, 1));
    let screening = Screening {
        cases: [&first, &second],
        metric: TIME,
        ebb: Keeper::Ebb,
        beside: &beside,
        shrinks: true,
        medium: Medium::Ssd,
    };
    compare::screen((session, &mut blocks, report), &screening, |keeper, pass| {
        let size = [SCREENED_MIB[pass], 1];
        compare::again(keeper, || one(keeper, work::COMPRESS, size, image))
    })
}

fn case(work: &str, limit_mib: u64, cpus: u32) -> String {
    match cpus {
        1 => format!("{work}, {limit_mib} MiB"),
        _ => format!("{work}, {limit_mib} MiB, {cpus} vCPUs"),
    }
}

/// Runs one VM with this many MiB and processors.
fn one(
    keeper: Keeper,
    command: &str,
    [limit_mib, cpus]: [u64; 2],
    image: &Path,
) -> anyhow::Result<Figures> {
    let setup = Setup::new(keeper, Medium::Ssd, [MEMORY_MIB, limit_mib], image);
    let rig = Rig::start(&Setup { cpus: cpus as u32, ..setup })?;
    compare::counting(&rig, |figures| {
        let seconds = work::seconds(&rig.vm, &format!("program /mnt {command}"))?;
        compare::add(figures, TIME.figure, seconds);
        Ok(())
    })
}

fn picture(work: Work, all: &[(u64, Taken)]) -> Panel {
    let mut names: Vec<&str> = all.iter().flat_map(|(_, taken)| taken.names()).collect();
    names.sort_unstable();
    names.dedup();
    let series = |name: &str| Series {
        name: name.into(),
        points: all
            .iter()
            .map(|(limit_mib, taken)| (*limit_mib, taken.rounds(name, TIME.figure)))
            .filter(|(_, rounds)| !rounds.figures().is_empty())
            .map(|(limit_mib, rounds)| (limit_mib as f64, rounds.median()))
            .collect(),
        is_bound: false,
    };
    let series = names.into_iter().map(series).collect();
    Panel { title: work.name.into(), series, ..Panel::default() }
}
