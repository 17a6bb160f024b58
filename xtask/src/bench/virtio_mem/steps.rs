//! Sizes step by step: Table 1, and Figures 3 and 4.

use std::time::Instant;

use vmtest::{Guest, until};

use super::mechanism::Mechanism;
use super::{KERNEL, MOVABLE, mib, node_mib, one, reach, settled_blocks};
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::plot::{Figure, Panel, Series};

/// Largest difference of Linux's count: Linux does not count its own image and tables.
const COUNT_OFF_MIB: f64 = 16.0;
/// The paper's steps: MiB of each node beyond its first size.
const STEPS: [[u64; 2]; 7] =
    [[16384, 8192], [8192, 16384], [8192, 8192], [500, 500], [502, 498], [504, 496], [0, 0]];

/// One step of one node.
struct Step {
    what: String,
    wanted_mib: f64,
    size_mib: f64,
    beyond_mib: f64,
    linux_mib: f64,
    seconds: f64,
}

/// Runs Table 1: two nodes, step by step.
///
/// # Errors
/// A size is not reached.
pub fn tab1(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("virtio-mem-tab1");
    let part = if quick { 4 } else { 1 };
    report.note(format!(
        "A guest with two nodes of {} MiB, and a virtio-mem device for each, of {} MiB; the \
         paper's steps{}. Linux: what MemTotal of the node has grown by.",
        4096 / part,
        16384 / part,
        if quick { ", beyond the beginning a quarter of them" } else { "" }
    ));
    let mut mechanisms = Mechanism::here(&mut report);
    mechanisms.retain(|&mechanism| mechanism != Mechanism::Balloon);
    let all = mechanisms.iter().map(|&mechanism| step_through(mechanism, part));
    let all: Vec<Vec<Step>> = all.collect::<anyhow::Result<_>>()?;
    for (mechanism, steps) in mechanisms.iter().zip(&all) {
        for step in steps {
            let what = format!("{}, {}", mechanism.name(), step.what);
            let size = Row::new(format!("{what}: size"), "MiB", &one(step.size_mib));
            report.row(size.against("requested", &one(step.wanted_mib)).exact().at_least(1.0));
            let linux = Row::new(format!("{what}: in Linux"), "MiB more", &one(step.linux_mib));
            report.row(linux.against("requested", &one(step.beyond_mib)));
        }
    }
    if let [own, qemus] = &all[..] {
        for (own, other) in own.iter().zip(qemus) {
            let time = Row::new(format!("{}: time", own.what), "s", &one(own.seconds));
            report.row(time.against(Mechanism::Qemus.name(), &one(other.seconds)));
        }
    }
    Ok(report)
}

fn step_through(mechanism: Mechanism, part: u64) -> anyhow::Result<Vec<Step>> {
    let node_began = 4096 / part;
    let guest = Guest::debian(KERNEL).append(MOVABLE).run_nodes(2);
    let vm = mechanism.start(guest, 2 * node_began, 40960 / part);
    let began = [node_mib(&vm, 0), node_mib(&vm, 1)];
    let mut done = Vec::new();
    for (step, beyond) in (1..).zip(STEPS) {
        for node in 0..2 {
            let beyond = beyond[node] / part / 2 * 2;
            let wanted = node_began + beyond;
            let start = Instant::now();
            let size = reach(&vm, &format!("{wanted}M --node {node}"))?;
            let grown = || node_mib(&vm, node) - began[node];
            until("the node's memory", || {
                ((grown() - beyond as f64).abs() < COUNT_OFF_MIB).then_some(())
            });
            done.push(Step {
                what: format!("step {step}, node {node}"),
                wanted_mib: wanted as f64,
                size_mib: mib(size.bytes),
                beyond_mib: beyond as f64,
                linux_mib: grown(),
                seconds: start.elapsed().as_secs_f64(),
            });
        }
    }
    Ok(done)
}

/// Runs Figures 3 and 4: what Linux keeps metadata for while a VM grows and shrinks.
///
/// # Errors
/// A size is not reached.
pub fn fig3(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("virtio-mem-fig3");
    let (began, most, step) = if quick { (1024, 3072, 512) } else { (4096, 20480, 1024) };
    report.note(format!(
        "A guest of {began} MiB grows to {most} MiB in steps of {step} MiB and shrinks again, by \
         each mechanism. Memory blocks in Linux (128 MiB each) after each step. DIMMs: not run; one of \
         a step's size brings as many blocks as virtio-mem does."
    ));
    let sizes: Vec<u64> = (began..=most).step_by(step).collect();
    let turns: Vec<u64> = sizes.iter().chain(sizes.iter().rev().skip(1)).copied().collect();
    let mechanisms = Mechanism::here(&mut report);
    let curve = |&mechanism: &Mechanism| -> anyhow::Result<Vec<(f64, f64)>> {
        let vm = mechanism.start(Guest::debian(KERNEL).append(MOVABLE), began, most);
        let at = |size: &u64| {
            reach(&vm, &format!("{size}M"))?;
            Ok((*size as f64 / 1024.0, settled_blocks(&vm)))
        };
        turns.iter().map(at).collect()
    };
    let curves: Vec<Vec<(f64, f64)>> =
        mechanisms.iter().map(curve).collect::<anyhow::Result<_>>()?;
    let balloon = &curves[curves.len() - 1];
    for (what, place) in [
        ("smallest, before", 0),
        ("largest", sizes.len() - 1),
        ("smallest, after", turns.len() - 1),
    ] {
        for (mechanism, curve) in mechanisms
            .iter()
            .zip(&curves)
            .filter(|(mechanism, _)| **mechanism != Mechanism::Balloon)
        {
            let what = format!("{}: memory blocks, {what}", mechanism.name());
            let row = Row::new(what, "", &one(curve[place].1));
            report.row(row.against("balloon", &one(balloon[place].1)).exact().at_most(1.0));
        }
    }
    let panel = |title: &str, range: std::ops::Range<usize>| Panel {
        title: title.into(),
        series: mechanisms
            .iter()
            .zip(&curves)
            .map(|(mechanism, points)| Series {
                name: mechanism.name().into(),
                points: points[range.clone()].to_vec(),
                is_bound: false,
            })
            .collect(),
        ..Panel::default()
    };
    let panels = [panel("growing", 0..sizes.len()), panel("shrinking", sizes.len()..turns.len())];
    report.plot(&Figure {
        title: "Memory blocks in Linux",
        x_label: "size, GiB",
        y_label: "blocks",
        panels: &panels,
    })?;
    Ok(report)
}
