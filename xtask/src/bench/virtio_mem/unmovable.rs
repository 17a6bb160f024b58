//! Figures 5 and 6: shrinking when unmovable memory may be anywhere.

use anyhow::ensure;
use ebb_api::SizeState;
use vmtest::{Guest, Vm};

use super::mechanism::Mechanism;
use super::{KERNEL, MIB, reach, resize, settled_blocks};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;

/// Kernel option: plugged memory is for the kernel itself, too.
const KERNELS: &str = "memhp_default_state=online_kernel";
/// Goal: percent of the plugged memory that is unplugged, which is the paper's worst result.
const UNPLUGGED_LEAST: f64 = 99.7;

/// Results of one mechanism.
struct Figures {
    mechanism: Mechanism,
    unplugged_percent: Rounds,
    blocks_left: Rounds,
}

/// Runs the benchmark.
///
/// # Errors
/// The VM does not grow.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("virtio-mem-fig5");
    let (began, most, rounds) = if quick { (1024, 3072, 1) } else { (2048, 8192, 5) };
    report.note(format!(
        "A guest of {began} MiB grows to {most} MiB, all of it in ZONE_NORMAL, is filled and \
         emptied by processes and files while slabs grow among them, and shrinks to where it \
         began; {rounds} rounds, a VM each. What is left are slabs."
    ));
    let new = |mechanism| Figures {
        mechanism,
        unplugged_percent: Rounds::default(),
        blocks_left: Rounds::default(),
    };
    let mut all: Vec<Figures> = Mechanism::here(&mut report).into_iter().map(new).collect();
    for _ in 0..rounds {
        for Figures { mechanism, unplugged_percent, blocks_left } in &mut all {
            let vm = mechanism.start(Guest::debian(KERNEL).append(KERNELS), began, most);
            reach(&vm, &format!("{most}M"))?;
            work(&vm, most)?;
            let size = resize(&vm, &format!("{began}M"))?;
            if size.state != SizeState::Reached {
                report.note(format!("{}: {}", mechanism.name(), size.stopped_by));
            }
            let unplugged = (most * MIB).saturating_sub(size.bytes);
            unplugged_percent.push(100.0 * unplugged as f64 / ((most - began) * MIB) as f64);
            blocks_left.push(settled_blocks(&vm));
        }
    }
    let Some((balloon, devices)) = all.split_last() else { return Ok(report) };
    for device in devices {
        let what = format!("{}: of what is to go, went", device.mechanism.name());
        let row = Row::new(what, "%", &device.unplugged_percent).not_less_than(UNPLUGGED_LEAST);
        report.row(row.against("balloon", &balloon.unplugged_percent));
        let what = format!("{}: memory blocks left", device.mechanism.name());
        let row = Row::new(what, "", &device.blocks_left);
        report.row(row.against("balloon", &balloon.blocks_left));
    }
    Ok(report)
}

/// Fills the guest with memory of processes, page cache and slabs.
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
