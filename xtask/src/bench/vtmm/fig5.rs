//! Figure 5: how many of a program's accesses fast memory serves, with room for half of its
//! pages, while its hot set stays and after it moved.

use ebb_heat::{TOP_LEVEL, Walk};

use super::placement::{Placement, Recency, by_degree, by_threshold};
use super::rig::{HotSet, Rig, WINDOWS};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::plot::{Figure, Panel, Series};

const PROGRAM_MIB: u64 = 200;
/// The paper's.
const HOT_PERCENTS: [u64; 6] = [10, 20, 40, 50, 60, 80];
const QUICK_PERCENTS: [u64; 4] = [10, 40, 50, 80];
const ROOM_PERCENT: u64 = 50;
/// Monitorings from one move of the hot set to the next.
const STAGE: usize = 2;
/// Where the hot set fits, and where it does not.
const GOALS: [f64; 2] = [0.99, 0.97];

/// Who places pages.
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

/// A share of the best after each monitoring; the hot set moves after each [`STAGE`] of them.
struct Course {
    percent: u64,
    policy: Policy,
    shares: Vec<f64>,
}

impl Course {
    /// At the end of the first stage.
    fn fixed(&self) -> Rounds {
        self.shares.iter().skip(STAGE - 1).take(1).copied().collect()
    }

    /// At the end of each later one.
    fn moved(&self) -> Rounds {
        self.shares.iter().skip(STAGE - 1).step_by(STAGE).skip(1).copied().collect()
    }
}

/// Runs it.
///
/// # Errors
/// Somebody interrupts.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("vtmm-fig5");
    report.note(format!(
        "A guest's program with {PROGRAM_MIB} MiB in 4 KiB pages under TCG: 90 % of its accesses \
         are of a hot part, scattered, the others of all. Fast memory has room for \
         {ROOM_PERCENT} % of the pages: plans over the program's pages say which; this host has one \
         node, so nothing is copied. Windows end when there was an access for each page. Figures are the share of \
         accesses that fast memory serves, of what it would at best, {STAGE} monitorings after the \
         beginning or after a move."
    ));
    let rig = Rig::start(PROGRAM_MIB, 2);
    let (percents, stages): (&[u64], _) =
        if quick { (&QUICK_PERCENTS, 3) } else { (&HOT_PERCENTS, 6) };
    let mut courses = Vec::new();
    for &percent in percents {
        courses.extend(by_counts(&rig, percent, stages)?);
        courses.push(by_recency(&rig, percent, stages)?);
    }
    rows(&mut report, &courses);
    plot(&report, &courses)?;
    Ok(report)
}

/// Heats the hot set of a stage.
fn stage(rig: &Rig, percent: u64, number: usize) -> HotSet {
    let hot = rig.hot_set(percent, number as u64);
    rig.heat(hot);
    hot
}

/// Fast memory as first touches leave it: it holds the program's first pages.
fn first_touched(rig: &Rig) -> Placement {
    Placement::new(&rig.frames()[..rig.frames().len() * ROOM_PERCENT as usize / 100])
}

/// What the queue counts, for those who go by that.
fn by_counts(rig: &Rig, percent: u64, stages: usize) -> anyhow::Result<Vec<Course>> {
    let mut courses = [Policy::Ebb, Policy::Threshold, Policy::Nobody]
        .map(|policy| (Course { percent, policy, shares: Vec::new() }, first_touched(rig)));
    let mut levels = rig.tracked.levels(TOP_LEVEL);
    for number in 0..stages {
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

/// What was used when, looked at in every window.
fn by_recency(rig: &Rig, percent: u64, stages: usize) -> anyhow::Result<Course> {
    let (mut recency, mut placement) = (Recency::default(), first_touched(rig));
    let mut course = Course { percent, policy: Policy::Lru, shares: Vec::new() };
    for number in 0..stages {
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

fn rows(report: &mut Report, courses: &[Course]) {
    for ebb in courses.iter().filter(|course| course.policy == Policy::Ebb) {
        let goal = GOALS[usize::from(ebb.percent > ROOM_PERCENT)];
        let others = courses.iter().filter(|course| course.percent == ebb.percent);
        for other in others.filter(|course| course.policy != Policy::Ebb) {
            for (what, figure) in
                [("fixed", Course::fixed as fn(&Course) -> Rounds), ("moved", Course::moved)]
            {
                let what = format!("{} % hot, {what}: share of the best", ebb.percent);
                let row = Row::new(what, "", &figure(ebb));
                let row = row.against(other.policy.name(), &figure(other));
                report.row(row.not_less_than(goal));
            }
        }
    }
}

fn plot(report: &Report, courses: &[Course]) -> anyhow::Result<()> {
    let mut percents: Vec<u64> = courses.iter().map(|course| course.percent).collect();
    percents.dedup();
    let panel = |&percent: &u64| Panel {
        title: format!("{percent} % hot"),
        series: POLICIES
            .iter()
            .filter_map(|&policy| {
                let is_it = |course: &&Course| course.percent == percent && course.policy == policy;
                let shares = &courses.iter().find(is_it)?.shares;
                let points = (1..).zip(shares).map(|(x, &share)| (f64::from(x), share)).collect();
                Some(Series { name: policy.name().into(), points, is_bound: false })
            })
            .collect(),
        marks: (1..)
            .map(|number| (number * STAGE) as f64 + 0.5)
            .take_while(|&at| courses.iter().any(|course| at < course.shares.len() as f64))
            .map(|at| (at, "moves".into()))
            .collect(),
        ..Panel::default()
    };
    let panels: Vec<Panel> = percents.iter().map(panel).collect();
    let title = "Accesses that fast memory serves, of the best (vTMM, fig. 5)";
    report.plot(&Figure { title, x_label: "monitoring", y_label: "", panels: &panels })
}
