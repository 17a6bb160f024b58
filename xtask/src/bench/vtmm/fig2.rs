//! Figure 2: what a window looks at in a real guest's page tables, and what it costs the guest.

use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_heat::{TOP_LEVEL, Walk};
use ebb_units::{FRAMES_PER_HUGE, HUGE_BYTES};
use vmtest::tracked::Tracked;
use vmtest::{Guest, Host, Vm};

use super::rig::{Rig, WINDOWS};
use crate::bench::cpu::{self, Thread};
use crate::bench::report::Report;
use crate::bench::rounds::{Rounds, us};
use crate::bench::row::Row;
use crate::bench::samples::wait_until;
use crate::bench::session::Session;
use crate::plot::{Figure, Panel, Series};

/// Memory of the program.
const PROGRAM: &str = "400M";
/// The program uses one of so many units of 2 MiB.
const PARTS: [u64; 4] = [10, 5, 2, 1];
/// Memory that is mapped and not used.
const COLD: &str = "800M";

/// Memory that a program accesses at random while its slowdown is measured.
const BUSY_MIB: u64 = 200;
/// Hot part of [`BUSY_MIB`], in percent.
const BUSY_PERCENT: u64 = 20;
/// Length of a window, as in the paper.
const WINDOW: Duration = Duration::from_millis(600);
/// Goal: largest slowdown, in percent.
const SLOWDOWN_GOAL: f64 = 1.0;

/// Runs the benchmark.
///
/// # Errors
/// Somebody interrupts, or the picture cannot be written.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("vtmm-fig2");
    looked_at(&mut report, quick)?;
    slowdown(&mut report, quick)?;
    Ok(report)
}

/// Measures how much mapped memory a window looks at, depending on how much of it is used: with
/// walks that skip unused memory, and with full walks (figure 2, part a).
fn looked_at(report: &mut Report, quick: bool) -> anyhow::Result<()> {
    report.note(format!(
        "A guest of 2 GiB with 4 KiB pages under TCG; {COLD} are mapped and not used, and of \
         {PROGRAM} a part is used again and again, in units of 2 MiB. Looked at is what the page \
         tables that were read can map."
    ));
    let guest = Guest::debian("6.1-cloud").memory("2G").append("pti=on transparent_hugepage=never");
    let vm = Host::new().qemu(guest);
    let tracked = Tracked::take(&vm);
    vm.guest(&format!("fill cold {COLD}"));
    let windows = if quick { 4 } else { 16 };
    let mut curves = [Vec::new(), Vec::new()];
    for part in PARTS {
        vm.guest(&format!("hot h {PROGRAM} {FRAMES_PER_HUGE} {part}"));
        let [pruned, full] = windows_of(&vm, &tracked, windows);
        vm.guest("hotstop h");
        let percent = 100.0 / part as f64;
        let row = |what: &str, unit, rounds| {
            Row::new(format!("{percent:.0} % used: {what}"), unit, rounds)
        };
        report
            .row(row("looked at", "MiB", &pruned.looked_at).against("all tables", &full.looked_at));
        report.row(row("a window", "us", &pruned.time).against("all tables", &full.time));
        report.row(
            row("metadata held, a window", "frames", &pruned.locked)
                .against("no queue", &full.locked),
        );
        for (curve, figures) in curves.iter_mut().zip([&pruned, &full]) {
            curve.push((percent, figures.looked_at.median()));
        }
    }
    let [pruned, full] = curves;
    let series = |name: &str, points| Series { name: name.into(), points, is_bound: false };
    let panel = Panel {
        series: vec![series("past what is not used", pruned), series("all tables", full)],
        ..Panel::default()
    };
    report.plot(&Figure {
        title: "Memory looked at in a window",
        x_label: "used of the program's memory [%]",
        y_label: "looked at [MiB]",
        panels: &[panel],
    })?;
    Ok(())
}

/// Figures of windows.
#[derive(Default)]
struct Windows {
    looked_at: Rounds,
    time: Rounds,
    locked: Rounds,
}

/// Measures windows with the queue, which skips unused memory, and full windows without a queue.
fn windows_of(vm: &Vm, tracked: &Tracked, count: u32) -> [Windows; 2] {
    [(TOP_LEVEL, Walk::Pruned), (0, Walk::Full)].map(|(top_level, walk)| {
        let (mut levels, mut windows) = (tracked.levels(top_level), Windows::default());
        levels.begin();
        tracked.round(Walk::Full, &mut levels);
        for _ in 0..count {
            vm.guest("hoton h 3");
            levels.next_window();
            let start = Instant::now();
            let round = tracked.round(walk, &mut levels);
            windows.time.push(us(start.elapsed()));
            windows.looked_at.push(round.tables as f64 * HUGE_BYTES as f64 / f64::from(1 << 20));
            windows.locked.push(round.locked_frames as f64);
        }
        windows
    })
}

/// Measures how much a program's accesses slow down while the VM is monitored, window after window
/// (figure 2, part b): with the queue, which skips unused memory, and with every table in every
/// window.
fn slowdown(report: &mut Report, quick: bool) -> anyhow::Result<()> {
    let busy = Busy::start()?;
    let (mut lost, mut spent): ([Rounds; 2], [Rounds; 2]) = Default::default();
    let mut before = busy.speed(alone)?;
    for _ in 0..if quick { 5 } else { 15 } {
        for (at, (top_level, walk)) in
            [(TOP_LEVEL, Walk::Pruned), (0, Walk::Full)].into_iter().enumerate()
        {
            let mut time = Duration::ZERO;
            let meanwhile = busy.speed(|| {
                time = monitor(&busy.rig.tracked, top_level, walk)?;
                Ok(())
            })?;
            let after = busy.speed(alone)?;
            lost[at].push(100.0 * (1.0 - meanwhile / ((before + after) / 2.0)));
            spent[at].push(us(time) / f64::from(WINDOWS));
            before = after;
        }
    }
    let row = |what: &str, unit, [queue, full]: &[Rounds; 2]| {
        Row::new(format!("{BUSY_MIB} MiB at random: {what}"), unit, queue)
            .against("all tables, no queue", full)
    };
    report.row(row("slowdown while monitored", "%", &lost).no_more_than(SLOWDOWN_GOAL));
    report.row(row("a window", "us", &spent));
    Ok(())
}

/// A guest whose only processor runs nothing but its program.
struct Busy {
    rig: Rig,
    processor: Thread,
}

impl Busy {
    fn start() -> anyhow::Result<Busy> {
        let rig = Rig::start(BUSY_MIB, 1);
        rig.heat(rig.hot_set(BUSY_PERCENT, 0));
        alone()?;
        let threads = cpu::threads(rig.vm.pid());
        let processor = threads.into_iter().max_by_key(Thread::ran).context("QEMU's threads")?;
        Ok(Busy { rig, processor })
    }

    /// Returns the program's accesses a second while something else takes place. Time in which the
    /// processor's thread waited for a processor of the host does not count, because others use
    /// those, too.
    fn speed(&self, meanwhile: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
        let (accesses, time) = self.so_far();
        meanwhile()?;
        let (accesses_after, time_after) = self.so_far();
        Ok((accesses_after - accesses) as f64 / (time_after - time).as_secs_f64())
    }

    fn so_far(&self) -> (u64, Duration) {
        let (accesses, us) = self.rig.progress(0);
        (accesses, Duration::from_micros(us).saturating_sub(self.processor.waited()))
    }
}

/// Does nothing for as long as a monitoring takes.
fn alone() -> anyhow::Result<()> {
    wait_until(Instant::now() + WINDOW * WINDOWS.into())
}

/// Does one monitoring, by the clock. Returns how long its rounds took.
fn monitor(tracked: &Tracked, top_level: u8, walk: Walk) -> anyhow::Result<Duration> {
    let mut levels = tracked.levels(top_level);
    levels.begin();
    let (start, mut busy) = (Instant::now(), Duration::ZERO);
    for window in 0..=u32::from(WINDOWS) {
        wait_until(start + WINDOW * window)?;
        let began = Instant::now();
        match window {
            0 => tracked.round(Walk::Full, &mut levels),
            _ => {
                levels.next_window();
                tracked.round(walk, &mut levels)
            }
        };
        busy += began.elapsed();
    }
    Ok(busy)
}
