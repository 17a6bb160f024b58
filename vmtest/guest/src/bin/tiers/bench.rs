//! How fast pages move, and what that costs the workload.

use std::time::{Duration, Instant};

use ebb_tier::{Mover, Node, Outcome, RateLimiter, Tier, mover};

use crate::rig::{FAST, Rig, SLOW};

/// For how long the workload is measured alone.
const ALONE: Duration = Duration::from_secs(1);

/// A way to move pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// By one thread in one call, as the kernel itself does.
    Serial,
    Parallel,
}

impl Mode {
    fn node(self, rig: &Rig, number: u32) -> Node {
        match self {
            Mode::Serial => rig.node(number, Mover::new(1, usize::MAX, RateLimiter::unlimited())),
            Mode::Parallel => rig.node(number, Mover::default()),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Mode::Serial => "serial",
            Mode::Parallel => "parallel",
        }
    }
}

/// Measures. Returns lines of `NAME FIGURE`, each with a figure of one round.
pub fn run(bytes: u64, rounds: usize) -> anyhow::Result<String> {
    let mut rig = Rig::new(bytes)?;
    let mut lines = vec![format!("workers {}", mover::workers())];
    for _ in 0..rounds {
        for mode in [Mode::Serial, Mode::Parallel] {
            at_rest(&mut rig, mode, bytes, &mut lines)?;
        }
        for mode in [Mode::Serial, Mode::Parallel] {
            at_work(&mut rig, mode, bytes, &mut lines)?;
        }
    }
    anyhow::ensure!(rig.peer.ask("check")? == [0], "wrong bytes");
    Ok(lines.join("\n"))
}

/// Moves all pages to the slow node and back. Returns the time, and the number of pages.
fn to_and_fro(rig: &Rig, mode: Mode) -> anyhow::Result<(Duration, u64)> {
    let start = Instant::now();
    let mut moved = 0;
    for number in [SLOW, FAST] {
        let outcomes = mode.node(rig, number).bring(&rig.frames)?;
        moved += outcomes.iter().filter(|&&outcome| outcome == Outcome::Moved).count() as u64;
    }
    Ok((start.elapsed(), moved))
}

fn at_rest(rig: &mut Rig, mode: Mode, bytes: u64, lines: &mut Vec<String>) -> anyhow::Result<()> {
    let (time, moved) = to_and_fro(rig, mode)?;
    let all = 2 * rig.frames.len() as u64;
    anyhow::ensure!(moved == all, "{moved} of {all} pages were moved");
    let faults = rig.peer.ask("read")?[0];
    let rate = (2 * bytes) as f64 / f64::from(1 << 20) / time.as_secs_f64();
    lines.push(format!("{}-rest-mib-s {rate:.2}", mode.name()));
    lines.push(format!("{}-rest-faults {faults}", mode.name()));
    Ok(())
}

/// Measures the same under a process that counts in pages at random, and how often that can count.
fn at_work(rig: &mut Rig, mode: Mode, bytes: u64, lines: &mut Vec<String>) -> anyhow::Result<()> {
    rig.peer.ask("work")?;
    let (start, before) = (Instant::now(), rig.peer.ask("so-far")?[0]);
    std::thread::sleep(ALONE);
    let alone = (rig.peer.ask("so-far")?[0] - before) as f64 / start.elapsed().as_secs_f64();
    let stopped = rig.peer.ask("stop")?;
    let mut push = |what: &str, figure: f64| {
        lines.push(format!("{}-work-{what} {figure:.4}", mode.name()));
    };
    push("faults-alone", stopped[1] as f64);
    rig.peer.ask("work")?;
    let (start, before) = (Instant::now(), rig.peer.ask("so-far")?[0]);
    let (time, moved) = to_and_fro(rig, mode)?;
    let ops = (rig.peer.ask("so-far")?[0] - before) as f64;
    let all = start.elapsed().as_secs_f64();
    let faults = rig.peer.ask("stop")?[1];
    push("mib-s", (2 * bytes) as f64 / f64::from(1 << 20) / time.as_secs_f64());
    push("moved-percent", 100.0 * moved as f64 / (2 * rig.frames.len()) as f64);
    push("speed-percent", 100.0 * ops / all / alone);
    // Time in which the workload alone would have done what it lost.
    push("lost-ms", 1000.0 * (all - ops / alone));
    push("faults-percent", 100.0 * faults as f64 / moved.max(1) as f64);
    push("faults-after", rig.peer.ask("read")?[0] as f64);
    Ok(())
}
