//! A look at a VM that nobody manages: what it costs, and how far its figures are from the guest's
//! own.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Context, anyhow};
use ebb_observe::{Observed, Usage, Watch};
use vmtest::{Guest, Host, Vm, assets};

use super::report::Report;
use super::rounds::{Rounds, us};
use super::row::Row;
use super::session::Session;

/// Kernels to look at, as far as they are here.
const KERNELS: [&str; 4] = ["5.10", "6.1-cloud", "6.12", "7.x"];
/// Memory of guests, in GiB: the cost of a look must not follow it.
const SIZES_GIB: [u64; 2] = [1, 4];
/// A look each 15 s for a thousandth of a processor, in microseconds.
const LOOK_US: f64 = 15_000.0;
/// Greatest error, in percent of the guest's memory.
const ERROR_PERCENT: f64 = 1.0;

/// Runs the benchmark.
///
/// # Errors
/// A guest is not understood, or does not answer.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let rounds = if session.identity.quick { 5 } else { 50 };
    let mut report = Report::new("observe");
    report.note("The guests have used nearly all of their memory before, and freed half of it.");
    for gib in SIZES_GIB {
        for (backing, ram) in [("private memory", "ram"), ("a memfd", "memfd,share=on")] {
            let vm = started(Guest::debian("6.1-cloud").memory(&format!("{gib}G")).ram(ram), gib);
            cost(&mut report, &vm, &format!("{gib} GiB in {backing}"), rounds)?;
        }
    }
    for label in KERNELS {
        match assets::kernel(label) {
            Ok(kernel) => error(&mut report, &started(Guest::of(kernel), 1), label, rounds / 5)?,
            Err(why) => report.note(format!("Linux {label} is not measured: {why}")),
        }
    }
    Ok(report)
}

fn started(guest: Guest, gib: u64) -> Vm {
    let vm = Host::new().qemu(guest);
    vm.guest("files f 100M");
    vm.guest(&format!("fill kept {}M", gib * 350));
    vm.guest(&format!("fill freed {}M", gib * 350));
    vm.guest("free freed");
    vm
}

/// Times the first look and the ones after it. All of the work is this thread's.
fn cost(report: &mut Report, vm: &Vm, what: &str, rounds: usize) -> anyhow::Result<()> {
    let (mut first, mut others) = (Rounds::default(), Rounds::default());
    for _ in 0..rounds.div_ceil(5) {
        let mut watch = Watch::open(vm.pid())?;
        for look in 0..6 {
            let began = Instant::now();
            usage(&mut watch)?;
            if look == 0 { &mut first } else { &mut others }.push(us(began.elapsed()));
        }
    }
    report.row(Row::new(format!("the first look, {what}"), "us", &first));
    report.row(Row::new(format!("a look, {what}"), "us", &others).no_more_than(LOOK_US));
    Ok(())
}

/// Compares figures with the guest's own, each in percent of its memory: the worst of all.
fn error(report: &mut Report, vm: &Vm, label: &str, rounds: usize) -> anyhow::Result<()> {
    let (mut watch, mut errors) = (Watch::open(vm.pid())?, Rounds::default());
    for _ in 0..rounds.max(5) {
        let told = vm.meminfo();
        let seen = vm.stopped(|| usage(&mut watch))?;
        errors.push(worst(&seen, &told)?);
    }
    let what = format!("greatest error of a figure, Linux {label}");
    report.row(Row::new(what, "% of memory", &errors).no_more_than(ERROR_PERCENT));
    Ok(())
}

fn usage(watch: &mut Watch) -> anyhow::Result<Usage> {
    let Observed { usage, .. } = watch.look()?;
    usage.map_err(|why| anyhow!("the guest: {why}"))
}

fn worst(seen: &Usage, told: &HashMap<String, u64>) -> anyhow::Result<f64> {
    let field = |name: &str| told.get(name).copied().with_context(|| format!("no {name}"));
    let counters = &seen.counters;
    let pairs = [
        (counters.total_bytes, field("MemTotal")?),
        (counters.free_bytes, field("MemFree")?),
        (counters.cache_bytes, field("Cached")? + field("Buffers")? + field("SwapCached")?),
        (counters.anonymous_bytes, field("AnonPages")?),
        (counters.slab_bytes, field("Slab")?),
    ];
    let apart = pairs.iter().map(|(seen, told)| seen.abs_diff(*told)).max().unwrap_or(0);
    Ok(apart as f64 * 100.0 / field("MemTotal")? as f64)
}
