//! Figure 10: with the guest's memory full of files, a process takes 200 MB and touches
//! them: pages that hold what was freed, and that are overwritten at once.

use std::path::Path;

use vmtest::Scratch;

use super::fig9::{LIMIT_MIB, MEMORY_MIB};
use super::medium::Medium;
use super::rig::{self, Both, Keeper, Rig, Setup};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

const IMAGE_BYTES: u64 = 700 << 20;
/// More than the guest believes to have.
const FILL_BYTES: u64 = 520 << 20;
/// Without the proof that the guest has freed a page to with it.
const GOAL: f64 = 0.5;

/// A process taking 200 MB.
struct Turn {
    seconds: f64,
    traffic: Both,
}

struct Run {
    keeper: Keeper,
    turns: Vec<Turn>,
}

/// Runs it.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("vswapper-fig10");
    let directory = Scratch::new("ebb-bench-")?;
    let image = rig::image(directory.path(), IMAGE_BYTES, |at| {
        work::random_file(&at.join("fill"), FILL_BYTES)
    })?;
    let (count, media): (_, &[Medium]) = match quick {
        true => (2, &[Medium::Ssd]),
        false => (4, &[Medium::Ssd, Medium::Hdd]),
    };
    let mut panels = Vec::new();
    for &medium in media {
        let mut runs = Vec::new();
        for keeper in [Keeper::Anonymous, Keeper::EbbBlind, Keeper::Ebb] {
            match work::again_if_killed(|| one(keeper, medium, &image, count)) {
                Ok(run) => runs.push(run),
                Err(why) => report.note(format!("{}, {}: {why}", medium.name(), keeper.name())),
            }
        }
        rows(&mut report, medium, &runs);
        panels.push(picture(medium, &runs));
    }
    let title = "Taking 200 MB when memory is full of files (VSwapper, fig. 10)";
    report.plot(&Figure { title, x_label: "time it was done", y_label: "", panels: &panels })?;
    Ok(report)
}

fn one(keeper: Keeper, medium: Medium, image: &Path, count: usize) -> anyhow::Result<Run> {
    let setup = Setup::new(keeper, medium, [MEMORY_MIB, LIMIT_MIB], image);
    let rig = Rig::start(&setup)?;
    let mut run = Run { keeper, turns: Vec::new() };
    for _ in 0..count {
        work::seconds(&rig.vm, "read /mnt/fill")?;
        let before = rig.traffic()?;
        let seconds = work::seconds(&rig.vm, &format!("allocate {}", work::FILE_BYTES))?;
        run.turns.push(Turn { seconds, traffic: rig.traffic()? - before });
    }
    Ok(run)
}

fn rows(report: &mut Report, medium: Medium, runs: &[Run]) {
    let of = |run: &Run, figure: fn(&Turn) -> f64| run.turns.iter().map(figure).collect::<Rounds>();
    let Some(ebb) = runs.iter().find(|run| run.keeper == Keeper::Ebb) else { return };
    for other in runs.iter().filter(|run| run.keeper != Keeper::Ebb) {
        let against = other.keeper.name();
        let row = |label: &str, unit, figure: fn(&Turn) -> f64| {
            let row = Row::new(format!("{}: {label}", medium.name()), unit, &of(ebb, figure));
            row.against(against, &of(other, figure))
        };
        let time = row("taking 200 MB", "s", |turn| turn.seconds);
        let is_goal = other.keeper == Keeper::EbbBlind;
        report.row(if is_goal { time.at_most(GOAL) } else { time });
        report.row(row("pages in", "", pages_in));
        report.row(row("pages swapped out", "", |turn| turn.traffic.swap.write_pages as f64));
    }
}

fn pages_in(turn: &Turn) -> f64 {
    (turn.traffic.disk.read_pages + turn.traffic.swap.read_pages) as f64
}

fn picture(medium: Medium, runs: &[Run]) -> Panel {
    let series = |run: &Run| Series {
        name: run.keeper.name().into(),
        points: (1..).zip(&run.turns).map(|(x, turn)| (f64::from(x), turn.seconds)).collect(),
        is_bound: false,
    };
    Panel {
        title: medium.name().into(),
        y_label: Some("seconds".into()),
        series: runs.iter().map(series).collect(),
        ..Panel::default()
    }
}
