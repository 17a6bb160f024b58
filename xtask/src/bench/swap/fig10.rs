//! Figure 10: with the guest's memory full of files, a process takes 200 MB and touches them. These
//! pages contain freed memory, and are overwritten at once.

use std::path::Path;

use super::compare::{self, Metric};
use super::fig9::{LIMIT_MIB, MEMORY_MIB};
use super::keeper::{Keeper, PLAIN_LINUX};
use super::linux::Linux;
use super::medium::Medium;
use super::rig::{self, Rig};
use super::setup::Setup;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::sweep;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vswapper-fig10";
const IMAGE_BYTES: u64 = 700 << 20;
/// Size of the files: more than the guest believes to have.
const FILL_BYTES: u64 = 520 << 20;
/// Greatest part of the time that Ebb needs without the proof that the guest has freed a page.
const GOAL: f64 = 0.5;
/// Number of repetitions: in a quick run, and in a full one.
const TURNS: [usize; 2] = [1, 3];

const TIME: Metric = Metric::less("taking 200 MB", "s", "seconds");
const METRICS: [Metric; 2] =
    [Metric::less("pages in", "", "pages-in"), Metric::less("pages swapped out", "", "pages-out")];

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    report.note(Linux::lacks());
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let directory = sweep::scratch()?;
    let image = rig::image(directory.path(), IMAGE_BYTES, |at| {
        work::random_file(&at.join("fill"), FILL_BYTES)
    })?;
    let medium = Medium::Ssd;
    let [short, long] = TURNS;
    let take = |keeper, turns| compare::again(keeper, || one(keeper, medium, &image, turns));
    // The goal compares Ebb with itself, so Linux's ways are not screened.
    let linux = PLAIN_LINUX;
    let sides = [&[Keeper::Ebb, Keeper::EbbBlind], &linux[..]].concat();
    let turns = if session.identity.quick { short } else { long };
    let context = (session, &mut blocks, &mut report);
    let taken = compare::take(context, medium.name(), &sides, |keeper| take(keeper, turns))?;
    rows(&mut report, &taken, &linux);
    let title = "Taking 200 MB when memory is full of files (VSwapper, fig. 10)";
    let panels = [picture(&taken)];
    report.plot(&Figure { title, x_label: "time it was done", y_label: "", panels: &panels })?;
    Ok(report)
}

fn one(keeper: Keeper, medium: Medium, image: &Path, turns: usize) -> anyhow::Result<Figures> {
    let setup = Setup::new(keeper, medium, [MEMORY_MIB, LIMIT_MIB], image);
    let rig = Rig::start(&setup)?;
    compare::counting(&rig, |figures| {
        for _ in 0..turns {
            work::seconds(&rig.vm, "read /mnt/fill")?;
            let before = rig.traffic()?;
            let seconds = work::seconds(&rig.vm, &format!("allocate {}", work::FILE_BYTES))?;
            let traffic = rig.traffic()? - before;
            let pages_in = traffic.disk.read_pages + traffic.swap.read_pages;
            compare::add(figures, "seconds", seconds);
            compare::add(figures, "pages-in", pages_in as f64);
            compare::add(figures, "pages-out", traffic.swap.write_pages as f64);
        }
        Ok(())
    })
}

fn rows(report: &mut Report, taken: &Taken, linux: &[Keeper]) {
    let [ebb, blind] =
        [Keeper::Ebb, Keeper::EbbBlind].map(|keeper| taken.rounds(&keeper.name(), TIME.figure));
    let time = Row::new(format!("{}: {}", taken.case, TIME.what), TIME.unit, &ebb);
    let time = time.failed(taken.failed());
    report.row(time.against_vms(Keeper::EbbBlind.name(), &blind).at_most(GOAL));
    compare::rows(report, taken, TIME, (Keeper::Ebb, linux), None);
    for metric in METRICS {
        let others = [&[Keeper::EbbBlind], linux].concat();
        compare::rows(report, taken, metric, (Keeper::Ebb, &others), None);
    }
    compare::costs(report, taken, Keeper::Ebb, linux);
}

fn picture(taken: &Taken) -> Panel {
    let series = |name: &str| Series {
        name: name.into(),
        points: (1..)
            .zip(taken.course(name, TIME.figure))
            .map(|(x, seconds)| (f64::from(x), seconds))
            .collect(),
        is_bound: false,
    };
    Panel {
        title: taken.case.clone(),
        y_label: Some("seconds".into()),
        series: taken.names().map(series).collect(),
        ..Panel::default()
    }
}
