//! How soon a guest whose memory the pilot has taken gets some back.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vmtest::{Guest, Host, Vm};

use super::{rest, status};
use crate::bench::blocks::Blocks;
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::rounds::percentile_us;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::sweep;
use crate::guard::reason;
use crate::interrupt;

const NAME: &str = "pilot-relief";
const SIDE: &str = "Ebb";
const MIB: u64 = 1 << 20;
const CLASSES: [&str; 3] = ["latency", "normal", "batch"];
/// So much of a guest's memory is evicted anew before the guest needs it.
const EVICTED_BYTES: u64 = 48 * MIB;
/// Longest wait until the pilot has taken that: it rests up to 40 s after the third relief.
const TAKEN_MOST: Duration = Duration::from_secs(150);
/// Longest wait for relief.
const RELIEF_MOST: Duration = Duration::from_secs(30);
/// Time between two questions: whoever asks takes processor time from the guest and from Ebb.
const ASK_EVERY: Duration = Duration::from_millis(20);
const GOAL_MS: f64 = 1000.0;
/// Beginning of a decision that sets a limit, and what its reason has if memory is missed.
const LIMIT: &str = "limit ";
const MISSED: &str = "came back within seconds";

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let (count, needs) = if session.identity.quick { (1, 1) } else { (7, 3) };
    report.note(format!(
        "Each block has three VMs of 384 MiB, one of each class, whose guests rest with 200 MiB \
         of memory in use. The pilot has a reserve of 90 % of the host, so that it takes what they \
         do not use. Once {} MiB of a guest's are evicted anew it reads all of its memory, {needs} times. \
         Relief: from this read's beginning until its limit was raised, as `ebb pilot` tells; \
         it is asked 20 ms after each answer. The p99 of a block is that of its {} times. Until it \
         was decided: by the decision's age.",
        EVICTED_BYTES / MIB,
        needs * CLASSES.len()
    ));
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let sides = (&[()][..], |()| SIDE.to_owned());
    let taken = blocks.take(&mut report, "three VMs", sides, count, |()| block(needs))?;
    let row = |what: &str, figure: &str| {
        Row::new(what, "ms", &taken.rounds(SIDE, figure)).failed(taken.failed())
    };
    report.row(row("relief, p99", "p99").no_more_than(GOAL_MS));
    report.row(row("relief, median", "p50"));
    for class in CLASSES {
        report.row(row(&format!("relief, {class}"), class));
    }
    report.row(row("of it until it was decided, p99", "decided"));
    report.row(row("the guest's read of 200 MiB", "read"));
    Ok(report)
}

fn block(needs: usize) -> anyhow::Result<Figures> {
    let (host, swap) = (Host::in_memory().unwrap_or_default(), sweep::scratch()?);
    host.set("EBB_SWAP_DIR", swap.path());
    // Tasks of the host that wait for memory would end no stage, and begin none.
    host.set("EBB_PRESSURE_STALL", "0");
    let mut vms = Vec::new();
    for class in CLASSES {
        interrupt::check()?;
        let vm = host.run(Guest::debian("6.1-cloud").memory("384M").cpus(1));
        vm.wait_trusted();
        vm.guest("fill kept 200M");
        vm.ebb(&format!("rule --class {class}")).ok();
        vms.push((class, vm));
    }
    host.ebb("pilot on --reserve 90%").ok();
    let (mut figures, mut before) = (Figures::new(), BTreeMap::new());
    let (mut all, mut decided) = (Vec::new(), Vec::new());
    for _ in 0..needs {
        for (class, vm) in &vms {
            wait_taken(vm, before.get(vm.name()).copied().unwrap_or(0))?;
            let (relief, read) = need(vm)?;
            before.insert(vm.name(), evicted(vm));
            all.push(relief.done);
            decided.push(relief.decided);
            add(&mut figures, class, relief.done.as_secs_f64() * 1e3);
            add(&mut figures, "read", read.as_secs_f64() * 1e3);
        }
    }
    for percent in [50, 99] {
        let ms = percentile_us(&mut all, percent) / 1e3;
        add(&mut figures, &format!("p{percent}"), ms);
    }
    add(&mut figures, "decided", percentile_us(&mut decided, 99) / 1e3);
    Ok(figures)
}

/// Times since a guest's need began.
struct Relief {
    /// Until the pilot decided to raise the limit.
    decided: Duration,
    /// Until it was raised, as the pilot tells.
    done: Duration,
}

/// Returns all that was evicted of a guest's memory so far.
fn evicted(vm: &Vm) -> u64 {
    let limit = vm.last_status().limit;
    limit.saved_total_bytes + limit.on_disk_total_bytes
}

/// Waits until the pilot has taken enough of a guest's memory since there were `before` bytes.
fn wait_taken(vm: &Vm, before: u64) -> anyhow::Result<()> {
    let end = Instant::now() + TAKEN_MOST;
    while evicted(vm) < before + EVICTED_BYTES {
        ensure!(Instant::now() < end, "the pilot takes nothing: {}", vm.host().ebb("pilot").stdout);
        rest(Duration::from_millis(300))?;
    }
    Ok(())
}

/// Has a guest read all of its memory. Returns when it was relieved, and how long the read took.
fn need(vm: &Vm) -> anyhow::Result<(Relief, Duration)> {
    let last = status(vm.host())?.decisions.first().map_or(0, |decision| decision.number);
    thread::scope(|scope| {
        let began = Instant::now();
        let reading = scope.spawn(move || {
            let answer = vm.guest("check kept");
            (answer, began.elapsed())
        });
        let relief = wait_relief(vm, last, began);
        let (answer, read) = reading.join().map_err(|panic| reason(&*panic))?;
        ensure!(answer == "0", "wrong bytes: {answer}");
        Ok((relief?, read))
    })
}

fn wait_relief(vm: &Vm, last: u64, began: Instant) -> anyhow::Result<Relief> {
    loop {
        rest(ASK_EVERY)?;
        let status = status(vm.host())?;
        let told = began.elapsed();
        let is_relief = |decision: &&ebb_api::PilotDecision| {
            let is_new = decision.number > last && decision.vm.as_str() == vm.name();
            is_new && decision.action.starts_with(LIMIT) && decision.why.contains(MISSED)
        };
        let relief = status.decisions.iter().filter(is_relief).last();
        if let Some(done) = relief.filter(|it| it.outcome.as_deref() == Some("done")) {
            let decided = told.saturating_sub(Duration::from_millis(done.age_ms));
            return Ok(Relief { decided, done: told });
        }
        let late = || format!("no relief: {}", vm.host().ebb("pilot").stdout);
        (began.elapsed() < RELIEF_MOST).then_some(()).with_context(late)?;
    }
}
