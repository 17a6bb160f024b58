//! Figure 5: how many of a program's accesses fast memory serves, with room for half of its pages,
//! before and after its hot set moves.

use ebb_heat::{TOP_LEVEL, Walk};

use super::placement::{Placement, Recency, by_degree, by_threshold};
use super::rig::{HotSet, Rig, WINDOWS};
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vtmm-fig5";
/// Name of the one side of a block, which has all policies.
const SIDE: &str = "Ebb";
const VMS: usize = 5;
const PROGRAM_MIB: u64 = 200;
/// Hot parts of the program's pages, in percent, as in the paper.
const HOT_PERCENTS: [u64; 6] = [10, 20, 40, 50, 60, 80];
const QUICK_PERCENTS: [u64; 4] = [10, 40, 50, 80];
const ROOM_PERCENT: u64 = 50;
/// Monitorings from one move of the hot set to the next.
const STAGE: usize = 2;
/// Goals where the hot set fits, and where it does not.
const GOALS: [f64; 2] = [0.99, 0.97];

/// Policy that places pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    Ebb,
    Lru,
    Threshold,
    Nobody,
}

const POLICIES: [Policy; 4] = [Policy::Ebb, Policy::Lru, Policy::Threshold, Policy::Nobody];

impl Policy {
    fn name(self) -> &'static str {
        match self {
            Policy::Ebb => "Ebb",
            Policy::Lru => "LRU",
            Policy::Threshold => "fixed threshold",
            Policy::Nobody => "none",
        }
    }
}

/// Share of the best possible after each monitoring. The hot set moves once, after [`STAGE`]
/// monitorings.
struct Course {
    percent: u64,
    policy: Policy,
    shares: Vec<f64>,
}

/// Figures of a course, and the stage after which each is taken.
const STAGES: [(&str, usize); 2] = [("fixed", 1), ("moved", 2)];
const COURSE: &str = "course";

/// Returns the name of a VM's figure.
fn figure(percent: u64, policy: Policy, what: &str) -> String {
    format!("{percent} %, {}, {what}", policy.name())
}

impl Course {
    fn add_to(self, figures: &mut Figures) {
        for (what, stage) in STAGES {
            if let Some(&share) = self.shares.get(stage * STAGE - 1) {
                add(figures, &figure(self.percent, self.policy, what), share);
            }
        }
        figures.insert(figure(self.percent, self.policy, COURSE), self.shares);
    }
}

/// Runs the benchmark.
///
/// # Errors
/// Somebody interrupts.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let (percents, count): (&[u64], _) =
        if session.identity.quick { (&QUICK_PERCENTS, 1) } else { (&HOT_PERCENTS, VMS) };
    report.note(format!(
        "A guest's program with {PROGRAM_MIB} MiB in 4 KiB pages: 90 % of its accesses \
         are of a hot part, scattered, the others of all. Fast memory has room for \
         {ROOM_PERCENT} % of the pages: plans over the program's pages say which; this host has one \
         node, so nothing is copied. Windows end when there was an access for each page. Figures are the share of \
         accesses that fast memory serves, of what it would at best, {STAGE} monitorings after the \
         beginning and after a move; {count} VMs."
    ));
    let sides = (&[()][..], |()| SIDE.to_owned());
    let taken = blocks.take(&mut report, "all policies", sides, count, |()| one(percents))?;
    rows(&mut report, percents, &taken);
    plot(&report, percents, &taken)?;
    Ok(report)
}

/// Takes one VM, on which all policies run.
fn one(percents: &[u64]) -> anyhow::Result<Figures> {
    let rig = Rig::start(PROGRAM_MIB, 2);
    let mut figures = Figures::new();
    for &percent in percents {
        by_counts(&rig, percent)?.into_iter().for_each(|course| course.add_to(&mut figures));
        by_recency(&rig, percent)?.add_to(&mut figures);
    }
    Ok(figures)
}

/// Makes the hot set of a stage hot.
fn stage(rig: &Rig, percent: u64, number: usize) -> HotSet {
    let hot = rig.hot_set(percent, number as u64);
    rig.heat(hot);
    hot
}

/// Returns fast memory as first touches leave it: with the program's first pages.
fn first_touched(rig: &Rig) -> Placement {
    Placement::new(&rig.frames()[..rig.frames().len() * ROOM_PERCENT as usize / 100])
}

/// Runs the policies that use the queue's counts.
fn by_counts(rig: &Rig, percent: u64) -> anyhow::Result<Vec<Course>> {
    let mut courses = [Policy::Ebb, Policy::Threshold, Policy::Nobody]
        .map(|policy| (Course { percent, policy, shares: Vec::new() }, first_touched(rig)));
    let mut levels = rig.tracked.levels(TOP_LEVEL);
    for number in 0..STAGES.len() {
        let hot = stage(rig, percent, number);
        let hot_frames = rig.hot_frames(hot);
        for _ in 0..STAGE {
            rig.monitor(&mut levels, WINDOWS, rig.pages())?;
            for (course, placement) in &mut courses {
                match course.policy {
                    Policy::Ebb => placement.follow(&by_degree(&levels, rig.frames())),
                    Policy::Threshold => placement.follow(&by_threshold(&levels, rig.frames())),
                    Policy::Lru | Policy::Nobody => (),
                }
                course.shares.push(placement.share_of_best(rig.frames(), hot, &hot_frames));
            }
        }
    }
    Ok(courses.map(|(course, _)| course).into())
}

/// Runs the policy that uses the last use of each page, seen in every window.
fn by_recency(rig: &Rig, percent: u64) -> anyhow::Result<Course> {
    let (mut recency, mut placement) = (Recency::default(), first_touched(rig));
    let mut course = Course { percent, policy: Policy::Lru, shares: Vec::new() };
    for number in 0..STAGES.len() {
        let hot = stage(rig, percent, number);
        let hot_frames = rig.hot_frames(hot);
        for _ in 0..STAGE {
            rig.windows(WINDOWS, rig.pages(), |window| {
                recency.next(window > 0);
                let walk = if window > 0 { Walk::Pruned } else { Walk::Full };
                rig.tracked.round(walk, &mut recency);
            })?;
            placement.follow(&recency.order(rig.frames()));
            course.shares.push(placement.share_of_best(rig.frames(), hot, &hot_frames));
        }
    }
    Ok(course)
}

fn rows(report: &mut Report, percents: &[u64], taken: &Taken) {
    for &percent in percents {
        let goal = GOALS[usize::from(percent > ROOM_PERCENT)];
        for other in POLICIES.into_iter().filter(|policy| *policy != Policy::Ebb) {
            for (what, _) in STAGES {
                let of = |policy| taken.rounds(SIDE, &figure(percent, policy, what));
                let what = format!("{percent} % hot, {what}: share of the best");
                let row = Row::new(what, "", &of(Policy::Ebb)).failed(taken.failed());
                report.row(row.against_vms(other.name(), &of(other)).not_less_than(goal));
            }
        }
    }
}

/// Draws the last VM.
fn plot(report: &Report, percents: &[u64], taken: &Taken) -> anyhow::Result<()> {
    let series = |percent: u64, policy: Policy| {
        let shares = taken.course(SIDE, &figure(percent, policy, COURSE));
        let points = (1..).zip(shares).map(|(x, share)| (f64::from(x), share)).collect();
        Series { name: policy.name().into(), points, is_bound: false }
    };
    let panel = |&percent: &u64| Panel {
        title: format!("{percent} % hot"),
        series: POLICIES.iter().map(|&policy| series(percent, policy)).collect(),
        marks: vec![(STAGE as f64 + 0.5, "moves".into())],
        ..Panel::default()
    };
    let panels: Vec<Panel> = percents.iter().map(panel).collect();
    let title = "Accesses that fast memory serves, of the best (vTMM, fig. 5)";
    report.plot(&Figure { title, x_label: "monitoring", y_label: "", panels: &panels })
}
