//! What the pilot itself costs, while all guests rest and while they work.

use std::time::{Duration, Instant};

use vmtest::{Guest, Host, Vm};

use super::rest;
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::cpu;
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::stats;
use crate::interrupt;

const NAME: &str = "pilot-cost";
const SIDE: &str = "Ebb";
/// Memory of a VM.
const MEMORY: &str = "192M";
/// Greatest cost of the pilot, in percent of a core for each VM.
const GOAL_PERCENT: f64 = 0.5;
/// Greatest cost while all rest: the least that the scheduler's clock tells from nothing.
const REST_PERCENT: f64 = 0.05;
/// Time until what a change causes has come to rest.
const SETTLE: Duration = Duration::from_secs(12);

/// What guests do while the cost is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Load {
    name: &'static str,
    begin: Option<&'static str>,
    end: &'static str,
}

const LOADS: [Load; 2] = [
    Load { name: "all rest", begin: None, end: "" },
    Load { name: "all work", begin: Some("hot load 64M 1 2"), end: "hotstop load" },
];

/// The pilot's modes.
const MODES: [&str; 2] = ["off", "on"];

/// Number of blocks and VMs, and how long each mode is measured.
struct Scale {
    blocks: usize,
    vms: usize,
    slice: Duration,
}

const FULL: Scale = Scale { blocks: 6, vms: 6, slice: Duration::from_secs(30) };
const QUICK: Scale = Scale { blocks: 1, vms: 3, slice: Duration::from_secs(8) };

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let scale = if session.identity.quick { QUICK } else { FULL };
    report.note(format!(
        "{} VMs of {MEMORY} on a host that has enough memory. Processor time of `ebbd` and of all \
         VMs' processes in {} s, with the pilot on and off in random order, for each VM. Guests at \
         work use half of 64 MiB again and again.",
        scale.vms,
        scale.slice.as_secs()
    ));
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let mut order = stats::order(blocks.seed(), NAME);
    let sides = (&[()][..], |()| SIDE.to_owned());
    let case = format!("{} VMs", scale.vms);
    let taken = blocks.take(&mut report, &case, sides, scale.blocks, |()| {
        let (mut loads, mut modes) = (LOADS, MODES);
        order.shuffle(&mut loads);
        order.shuffle(&mut modes);
        block(&loads, &modes, &scale)
    })?;
    rows(&mut report, &taken);
    Ok(report)
}

fn block(loads: &[Load], modes: &[&'static str], scale: &Scale) -> anyhow::Result<Figures> {
    let host = Host::in_memory().unwrap_or_default();
    let mut vms = Vec::new();
    for _ in 0..scale.vms {
        interrupt::check()?;
        let vm = host.run(Guest::debian("6.1-cloud").memory(MEMORY).cpus(1));
        vm.wait_trusted();
        vms.push(vm);
    }
    let mut figures = Figures::new();
    for load in loads {
        if let Some(begin) = load.begin {
            vms.iter().for_each(|vm| drop(vm.guest(begin)));
        }
        for mode in modes {
            host.ebb(&format!("pilot {mode}")).ok();
            rest(SETTLE)?;
            measure(&mut figures, (load.name, mode), &vms, scale.slice)?;
        }
        if load.begin.is_some() {
            vms.iter().for_each(|vm| drop(vm.guest(load.end)));
        }
    }
    Ok(figures)
}

/// Adds what all processes of Ebb's cost, in percent of a core for each VM.
fn measure(
    figures: &mut Figures,
    (load, mode): (&str, &str),
    vms: &[Vm],
    slice: Duration,
) -> anyhow::Result<()> {
    let Some(host) = vms.first().map(Vm::host) else { return Ok(()) };
    let daemon = host.daemon().ok_or_else(|| anyhow::anyhow!("ebbd has ended"))?;
    let servers = host.servers();
    let ran = || {
        let of_vms: Duration = servers.iter().map(|pid| cpu::of_process(*pid)).sum();
        (Instant::now(), cpu::of_process(daemon), of_vms)
    };
    let before = ran();
    rest(slice)?;
    let after = ran();
    let percent = |ran: Duration| {
        let part = ran.as_secs_f64() / (after.0 - before.0).as_secs_f64();
        part * 100.0 / vms.len() as f64
    };
    add(figures, &of(load, mode, "ebbd"), percent(after.1.saturating_sub(before.1)));
    add(figures, &of(load, mode, "vms"), percent(after.2.saturating_sub(before.2)));
    Ok(())
}

fn of(load: &str, mode: &str, whose: &str) -> String {
    format!("{load}, {mode}, {whose}")
}

fn rows(report: &mut Report, taken: &Taken) {
    for load in LOADS {
        let rounds = |mode, whose| taken.rounds(SIDE, &of(load.name, mode, whose));
        let sum = |mode| added(&rounds(mode, "ebbd"), &rounds(mode, "vms"), 1.0);
        // Noise may make a difference negative: that is no cost.
        let more = added(&sum("on"), &sum("off"), -1.0);
        let goal = if load.begin.is_none() { REST_PERCENT } else { GOAL_PERCENT };
        let row = |what: &str, rounds: &Rounds| {
            Row::new(format!("{}: {what}", load.name), "% of a core, a VM", rounds)
                .failed(taken.failed())
        };
        report.row(row("the pilot, all processes", &more).no_more_than(goal));
        for (whose, name) in [("ebbd", "ebbd"), ("vms", "the VMs' processes")] {
            let row = row(&format!("{name}, pilot on"), &rounds("on", whose));
            report.row(row.against("pilot off", &rounds("off", whose)));
        }
    }
}

/// Returns the sum of two figures of each round, the second one times a factor.
fn added(one: &Rounds, other: &Rounds, factor: f64) -> Rounds {
    one.figures().iter().zip(other.figures()).map(|(one, other)| one + factor * other).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_is_the_difference_round_by_round() {
        let [on, off]: [Rounds; 2] =
            [[3.0, 5.0], [1.0, 2.0]].map(|side| side.into_iter().collect());
        assert_eq!(added(&on, &off, -1.0).figures(), [2.0, 3.0]);
    }
}
