//! Figure 9: a guest that has 100 MB and believes to have 512 reads a file of 200 MB again and
//! again.

use std::path::Path;

use super::compare::{self, Metric, Screening};
use super::keeper::Keeper;
use super::linux::Linux;
use super::medium::Medium;
use super::rig::{self, Both, Rig};
use super::setup::Setup;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::sweep;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

pub const MEMORY_MIB: u64 = 512;
pub const LIMIT_MIB: u64 = 100;
const NAME: &str = "vswapper-fig9";
const IMAGE_BYTES: u64 = 400 << 20;
/// Most requests of the last iteration, as a part of those of the second.
const FLAT: f64 = 1.1;

/// A case: a disk, a number of processors, and how often the file is read in a quick run and in a
/// full one.
#[derive(Clone, Copy)]
struct Case {
    medium: Medium,
    cpus: u32,
    reads: [usize; 2],
}

const CASES: [Case; 3] = [
    Case { medium: Medium::Ssd, cpus: 1, reads: [3, 8] },
    Case { medium: Medium::Ssd, cpus: 2, reads: [3, 8] },
    Case { medium: Medium::Hdd, cpus: 1, reads: [2, 4] },
];

/// Sides without a limit, and with no more memory than the limit. They are shown, but not compared.
const OTHERS: [Keeper; 2] = [Keeper::Nobody, Keeper::Small];

const TIME: Metric = Metric::less("an iteration, from the second on", "s", "later");
const METRICS: [Metric; 4] = [
    Metric::less("the first iteration", "s", "first"),
    Metric::less("requests in, an iteration", "", "requests"),
    Metric::less("pages in, an iteration", "", "pages-in"),
    Metric::less("pages swapped out, an iteration", "", "pages-out"),
];

/// Returns the greatest part of the best baseline's time: Ebb should be 6 times as fast, or 1.5
/// times.
const fn goal(medium: Medium) -> f64 {
    match medium {
        Medium::Hdd => 0.17,
        Medium::Ssd => 0.67,
    }
}

impl Case {
    fn name(self) -> String {
        match self.cpus {
            1 => self.medium.name().to_owned(),
            cpus => format!("{}, {cpus} vCPUs", self.medium.name()),
        }
    }

    /// Returns the sides. Those without a limit, and those that know of it, appear in one case
    /// only.
    fn sides(self, quick: bool, linux: &[Keeper]) -> Vec<Keeper> {
        let mut sides = [&[Keeper::Ebb], linux].concat();
        if !quick && self.is_plain() {
            sides.extend(OTHERS);
        }
        sides
    }

    /// Whether this is the case whose sides include Linux's defaults and all sides that appear only
    /// once.
    fn is_plain(self) -> bool {
        self.medium == Medium::Ssd && self.cpus == 1
    }
}

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
        work::random_file(&at.join("file"), work::FILE_BYTES)
    })?;
    let quick = session.identity.quick;
    let mut panels = Vec::new();
    let [on_one, on_two, on_hdd] = CASES;
    let screened = [[on_one, on_two], [on_hdd, on_hdd]]
        .map(|cases| screen((session, &mut blocks, &mut report), cases, &image));
    let [on_ssd, on_hdd] = screened;
    let (on_ssd, on_hdd) = (on_ssd?, on_hdd?);
    for case in CASES.into_iter().filter(|case| !quick || case.cpus == 1) {
        let linux = match (case.medium, case.is_plain()) {
            (Medium::Hdd, _) => compare::best(&on_hdd, usize::MAX),
            (Medium::Ssd, true) => &on_ssd[..],
            (Medium::Ssd, false) => compare::best(&on_ssd, usize::MAX),
        };
        let sides = case.sides(quick, linux);
        let context = (session, &mut blocks, &mut report);
        let reads = case.reads[usize::from(!quick)];
        let taken = compare::take(context, &case.name(), &sides, |keeper| {
            compare::again(keeper, || one(keeper, case, &image, reads))
        })?;
        rows(&mut report, case.medium, &taken, linux);
        panels.extend(pictures(&taken));
    }
    let title = "Reading 200 MB again and again with 100 MB of 512 (VSwapper, fig. 9)";
    report.plot(&Figure { title, x_label: "iteration", y_label: "", panels: &panels })?;
    Ok(report)
}

/// Screens Linux's ways by two cases.
fn screen(
    context: (&Session, &mut Blocks, &mut Report),
    passes: [Case; 2],
    image: &Path,
) -> anyhow::Result<Vec<Keeper>> {
    let [first, second] = passes.map(Case::name);
    let screening = Screening {
        cases: [&first, &second],
        metric: TIME,
        ebb: Keeper::Ebb,
        beside: &[Keeper::Balloon],
        shrinks: false,
        medium: passes[0].medium,
    };
    compare::screen(context, &screening, |keeper, pass| {
        let case = passes[pass];
        compare::again(keeper, || one(keeper, case, image, case.reads[0]))
    })
}

fn one(keeper: Keeper, case: Case, image: &Path, reads: usize) -> anyhow::Result<Figures> {
    let memory_mib = if keeper == Keeper::Small { LIMIT_MIB } else { MEMORY_MIB };
    let setup = Setup::new(keeper, case.medium, [memory_mib, LIMIT_MIB], image);
    let rig = Rig::start(&Setup { cpus: case.cpus, ..setup })?;
    compare::counting(&rig, |figures| {
        let (mut requests, mut most_out) = (Vec::new(), 0.0_f64);
        for number in 0..reads {
            let before = rig.traffic()?;
            let seconds = work::seconds(&rig.vm, "read /mnt/file")?;
            let traffic = rig.traffic()? - before;
            let mut add = |name: &str, figure: f64| compare::add(figures, name, figure);
            add("course", seconds);
            add("course-requests", read_requests(&traffic));
            add("course-pages-out", traffic.swap.write_pages as f64);
            if number == 0 {
                add("first", seconds);
                continue;
            }
            add("later", seconds);
            add("requests", read_requests(&traffic));
            add("pages-in", (traffic.disk.read_pages + traffic.swap.read_pages) as f64);
            add("pages-out", traffic.swap.write_pages as f64);
            requests.push(read_requests(&traffic));
            most_out = most_out.max(traffic.swap.write_pages as f64);
        }
        compare::add(figures, "most-pages-out", most_out);
        if let (Some(second), Some(last)) = (requests.first(), requests.last()) {
            compare::add(figures, "second-requests", *second);
            compare::add(figures, "last-requests", *last);
        }
        Ok(())
    })
}

fn read_requests(traffic: &Both) -> f64 {
    (traffic.disk.read_requests + traffic.swap.read_requests) as f64
}

fn rows(report: &mut Report, medium: Medium, taken: &Taken, linux: &[Keeper]) {
    let sides = (Keeper::Ebb, linux);
    compare::rows(report, taken, TIME, sides, Some(goal(medium)));
    for metric in METRICS {
        compare::rows(report, taken, metric, sides, None);
    }
    compare::rows(report, taken, TIME, (Keeper::Ebb, &OTHERS), None);
    let name = Keeper::Ebb.name();
    let what = |what: &str| format!("{}: {what}", taken.case);
    let out = taken.rounds(&name, "most-pages-out");
    let most = what("most pages swapped out in an iteration, from the second on");
    report.row(Row::new(most, "", &out).failed(taken.failed()).no_more_than(0.0));
    let [last, second] =
        ["last-requests", "second-requests"].map(|figure| taken.rounds(&name, figure));
    let flat = Row::new(what("requests in, the last iteration"), "", &last);
    report.row(flat.failed(taken.failed()).against("the second", &second).at_most(FLAT));
    compare::costs(report, taken, Keeper::Ebb, linux);
}

fn pictures(taken: &Taken) -> Vec<Panel> {
    let panel = |label: &str, figure: &str| Panel {
        title: format!("{}: {label}", taken.case),
        y_label: Some(label.into()),
        series: taken.names().map(|name| series(taken, name, figure)).collect(),
        ..Panel::default()
    };
    vec![
        panel("seconds an iteration", "course"),
        panel("requests in", "course-requests"),
        panel("pages swapped out", "course-pages-out"),
    ]
}

/// Returns a curve of the last block.
fn series(taken: &Taken, name: &str, figure: &str) -> Series {
    let points = (1..).zip(taken.course(name, figure));
    let points = points.map(|(x, figure)| (f64::from(x), figure)).collect();
    Series { name: name.into(), points, is_bound: false }
}
