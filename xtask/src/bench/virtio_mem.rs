//! Growing and shrinking a VM by virtio-mem and by its balloon: Table 1 and Figures 3 to 6 of
//! virtio-mem's paper, and how long it takes.

use std::time::Instant;

use anyhow::{Context, ensure};
use ebb_api::{ResizeReport, SizeState};
use vmtest::{Guest, Host, Vm, until};

use super::report::{Report, Row};
use super::rounds::Rounds;
use super::vm::GIB;
use crate::plot::{Figure, Panel, Series};

const MIB: u64 = 1 << 20;
const KERNEL: &str = "6.1-cloud";
const MOVABLE: &str = "memhp_default_state=online_movable";
const KERNELS: &str = "memhp_default_state=online_kernel";
/// Linux counts its own image and tables out.
const COUNT_OFF_MIB: f64 = 16.0;
/// Of what was plugged, in percent: the paper's worst.
const UNPLUGGED_LEAST: f64 = 99.7;

fn one(figure: f64) -> Rounds {
    [figure].into_iter().collect()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

fn resize(vm: &Vm, words: &str) -> anyhow::Result<ResizeReport> {
    let ran = vm.ebb(&format!("resize {words} --json"));
    ensure!(ran.code == Some(0), "resize {words}: {}", ran.stderr);
    serde_json::from_str(&ran.stdout).context("a report")
}

/// The same, where all of it is to be had.
fn reach(vm: &Vm, words: &str) -> anyhow::Result<ResizeReport> {
    let report = resize(vm, words)?;
    ensure!(report.state == SizeState::Reached, "resize {words}: {}", report.stopped_by);
    Ok(report)
}

fn node_mib(vm: &Vm, node: usize) -> f64 {
    let text = vm.guest(&format!("cat /sys/devices/system/node/node{node}/meminfo"));
    let mut words = text.split_whitespace().skip_while(|&word| word != "MemTotal:").skip(1);
    words.next().and_then(|kib| kib.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
}

/// Blocks of 128 MiB that Linux keeps metadata for.
fn blocks(vm: &Vm) -> f64 {
    let text = vm.guest("sh ls -d /sys/devices/system/memory/memory* | wc -l");
    text.trim().parse().unwrap_or(f64::NAN)
}

/// Table 1: two nodes, step by step.
///
/// # Errors
/// A size is not reached.
pub fn tab1(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("virtio-mem-tab1");
    let part = if quick { 4 } else { 1 };
    let node_began = 4096 / part;
    report.note(format!(
        "A guest with two nodes of {node_began} MiB, and a virtio-mem device of QEMU's for each, \
         of {} MiB; the paper's steps{}. Linux: what MemTotal of the node has grown by.",
        16384 / part,
        if quick { ", beyond the beginning a quarter of them" } else { "" }
    ));
    let guest = Guest::debian(KERNEL).append(MOVABLE).run_nodes(2);
    let (memory, most) = (2 * node_began, 40960 / part);
    let vm = Host::new().run(guest.memory(&format!("{memory}M")).grow_to(&format!("{most}M")));
    let began = [node_mib(&vm, 0), node_mib(&vm, 1)];
    let steps =
        [[16384, 8192], [8192, 16384], [8192, 8192], [500, 500], [502, 498], [504, 496], [0, 0]];
    for (step, beyond) in (1..).zip(steps) {
        for node in 0..2 {
            let beyond = beyond[node] / part / 2 * 2;
            let wanted = node_began + beyond;
            let start = Instant::now();
            let told = reach(&vm, &format!("{wanted}M --node {node}"))?;
            let what = format!("step {step}, node {node}");
            let size = one(mib(told.bytes));
            report.row(
                Row::new(format!("{what}: size"), "MiB", &size)
                    .against("requested", &one(wanted as f64))
                    .at_least(1.0),
            );
            let grown = || node_mib(&vm, node) - began[node];
            until("the node's memory", || {
                ((grown() - beyond as f64).abs() < COUNT_OFF_MIB).then_some(())
            });
            report.row(
                Row::new(format!("{what}: in Linux"), "MiB more", &one(grown()))
                    .against("requested", &one(beyond as f64)),
            );
            report.row(Row::new(format!("{what}: time"), "s", &one(start.elapsed().as_secs_f64())));
        }
    }
    Ok(report)
}

/// Figures 3 and 4: what Linux keeps metadata for while a VM grows and shrinks.
///
/// # Errors
/// A size is not reached.
pub fn fig3(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("virtio-mem-fig3");
    let (began, most, step) = if quick { (1024, 3072, 256) } else { (4096, 20480, 512) };
    report.note(format!(
        "A guest of {began} MiB grows to {most} MiB in steps of {step} MiB and shrinks again, by \
         QEMU's virtio-mem; and by a balloon in one that began with {most} MiB. Memory blocks in \
         Linux (128 MiB each) after each step. DIMMs: a block each, as virtio-mem; not run."
    ));
    let host = Host::new();
    let guest = Guest::debian(KERNEL).append(MOVABLE);
    let plugs = guest.clone().memory(&format!("{began}M")).grow_to(&format!("{most}M"));
    let sizes: Vec<u64> = (began..=most).step_by(step).collect();
    let turns: Vec<u64> = sizes.iter().chain(sizes.iter().rev().skip(1)).copied().collect();
    let curves = [plugs, guest.memory(&format!("{most}M"))].map(|guest| {
        let vm = host.run(guest);
        let at = |size: &u64| {
            reach(&vm, &format!("{size}M"))?;
            Ok((*size as f64 / 1024.0, settled_blocks(&vm)))
        };
        turns.iter().map(at).collect::<anyhow::Result<Vec<(f64, f64)>>>()
    });
    let [plugs, balloon] = curves;
    let (plugs, balloon) = (plugs?, balloon?);
    for (what, place) in [
        ("smallest, before", 0),
        ("largest", sizes.len() - 1),
        ("smallest, after", turns.len() - 1),
    ] {
        let row = Row::new(format!("memory blocks, {what}"), "", &one(plugs[place].1));
        report.row(row.against("balloon", &one(balloon[place].1)).at_most(1.0));
    }
    let panel = |title: &str, range: std::ops::Range<usize>| Panel {
        title: title.into(),
        series: [("virtio-mem", &plugs), ("balloon", &balloon)]
            .map(|(name, points)| Series {
                name: name.into(),
                points: points[range.clone()].to_vec(),
                is_bound: false,
            })
            .into(),
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

/// Linux removes a block a little after the device has it.
fn settled_blocks(vm: &Vm) -> f64 {
    let mut before = blocks(vm);
    until("the blocks to stay", || {
        let now = blocks(vm);
        let stays = now == before;
        before = now;
        stays.then_some(now)
    })
}

/// Figures 5 and 6: shrinking when memory that cannot move may lie anywhere.
///
/// # Errors
/// The VM does not grow.
pub fn fig5(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("virtio-mem-fig5");
    let (began, most, rounds) = if quick { (1024, 3072, 1) } else { (2048, 10240, 3) };
    report.note(format!(
        "A guest of {began} MiB grows to {most} MiB, all of it in ZONE_NORMAL, is filled and \
         emptied by processes and files while slabs grow among them, and shrinks to where it \
         began; {rounds} rounds, a VM each. By the balloon: in a VM that began with {most} MiB."
    ));
    let mut results = [(); 2].map(|()| [(); 2].map(|()| Rounds::default()));
    for _ in 0..rounds {
        let guest = Guest::debian(KERNEL).append(KERNELS);
        let plugs = guest.clone().memory(&format!("{began}M")).grow_to(&format!("{most}M"));
        for (guest, result) in
            [plugs, guest.memory(&format!("{most}M"))].into_iter().zip(&mut results)
        {
            let vm = Host::new().run(guest);
            reach(&vm, &format!("{most}M"))?;
            work(&vm, most)?;
            let told = resize(&vm, &format!("{began}M"))?;
            if told.state != SizeState::Reached {
                report.note(format!("{}: {}", told.mechanism, told.stopped_by));
            }
            let gone = (most * MIB).saturating_sub(told.bytes);
            result[0].push(100.0 * gone as f64 / ((most - began) * MIB) as f64);
            result[1].push(settled_blocks(&vm));
        }
    }
    let [[unplugged, left], [ballooned, kept]] = results;
    let row = Row::new("of what is to go, went", "%", &unplugged).against("balloon", &ballooned);
    report.row(row.at_least(UNPLUGGED_LEAST / 100.0));
    report.row(Row::new("memory blocks left", "", &left).against("balloon", &kept));
    Ok(report)
}

/// Memory of processes, page cache and slabs, all over; what is left of it are slabs.
fn work(vm: &Vm, size_mib: u64) -> anyhow::Result<()> {
    vm.forgive();
    vm.guest(&format!("fill a {}M", size_mib / 2));
    vm.guest(&format!("files b {}M", size_mib / 8));
    let many = "i=0; while [ $i -lt 20000 ]; do echo > /tmp/d/$i; i=$((i+1)); done";
    vm.guest(&format!("sh mkdir /tmp/d; {many}"));
    vm.guest(&format!("churn load 86400 {}M", size_mib / 8));
    vm.churn_on(4);
    let churn = vm.churn_stop();
    ensure!(churn.wrong_bytes == 0, "{churn:?}");
    ["free a", "rmfiles b", "sh rm -r /tmp/d", "dropcaches"].iter().for_each(|line| {
        vm.guest(line);
    });
    Ok(())
}

/// Plugging and unplugging, against the balloon.
///
/// # Errors
/// A size is not reached.
pub fn plug(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("virtio-mem-plug");
    let (gib, rounds) = if quick { (1, 2) } else { (4, 5) };
    report.note(format!(
        "{gib} GiB come and go, by QEMU's virtio-mem in a VM that began with 1 GiB, and by the \
         balloon in one that began with {} GiB; {rounds} rounds, in turn. Plugged memory is filled \
         and freed before it goes. The times are those from the request to when QEMU has the \
         size, as `ebb resize` tells, looked at every 0.2 s; smaller includes waiting for the guest's figures, \
         which come every second.",
        1 + gib
    ));
    let host = Host::new();
    let guest = Guest::debian(KERNEL).append(MOVABLE);
    let most = format!("{}G", 1 + gib);
    let vms = [host.run(guest.clone().memory("1G").grow_to(&most)), host.run(guest.memory(&most))];
    let mut times = [(); 2].map(|()| [(); 2].map(|()| Rounds::default()));
    let mut left = [(); 2].map(|()| Rounds::default());
    for vm in &vms {
        reach(vm, "1G")?;
    }
    for _ in 0..rounds {
        for (place, vm) in vms.iter().enumerate() {
            times[place][0].push(reach(vm, &most)?.duration_ns as f64 / 1e9);
            vm.guest(&format!("fill a {}M", gib * 1024 - 128));
            vm.guest("free a");
            times[place][1].push(reach(vm, "1G")?.duration_ns as f64 / 1e9);
            left[place].push(vm.host_bytes() as f64 / GIB as f64);
        }
    }
    let [[plug, unplug], [deflate, inflate]] = times;
    report.row(Row::new(format!("{gib} GiB more"), "s", &plug).against("balloon", &deflate));
    report.row(Row::new(format!("{gib} GiB less"), "s", &unplug).against("balloon", &inflate));
    report
        .row(Row::new("... and left of the host's", "GiB", &left[0]).against("balloon", &left[1]));
    Ok(report)
}
