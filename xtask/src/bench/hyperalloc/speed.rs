//! Figure 4 in guests: how fast memory leaves a VM and comes back, by each keeper.

use std::time::{Duration, Instant};

use vmtest::{Host, Vm};

use super::keeper::{self, Keeper, Setup};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::vm::GIB;
use crate::interrupt;

const MEMORY_MIB: u64 = 2048;
const SMALL_MIB: u64 = 640;
const MIB: u64 = 1 << 20;
const FILL_MIB: u64 = 1700;
/// Memory that the host must get back for a shrink to be done. It is less than was requested,
/// because not all of that was ever touched, and the keeper chooses what goes first.
const WANTED_MIB: u64 = 1100;
/// Longest wait for a keeper. One that takes longer counts as this slow.
const DEADLINE: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(1);
const KEEPERS: [Keeper; 4] =
    [Keeper::HyperAlloc, Keeper::Balloon, Keeper::VirtioMem, Keeper::Reporting];

/// Figures in GiB/s.
struct Speeds {
    keeper: Keeper,
    touched: Rounds,
    untouched: Rounds,
    returned: Rounds,
    install: Rounds,
}

/// Adds the rows of guests.
///
/// # Errors
/// There is no such kernel.
pub fn rows(report: &mut Report, rounds: usize) -> anyhow::Result<()> {
    keeper::note_kernels(report)?;
    let mut all = Vec::new();
    for keeper in KEEPERS {
        let host = Host::new();
        let vm = keeper.start(&host, &Setup { memory_mib: MEMORY_MIB, cpus: 2, image: None });
        let new = Rounds::default;
        let mut speeds =
            Speeds { keeper, touched: new(), untouched: new(), returned: new(), install: new() };
        for _ in 0..rounds {
            speeds.round(&vm)?;
        }
        all.push(speeds);
    }
    let Some((ebb, others)) = all.split_first() else { return Ok(()) };
    for other in others {
        let mut row = |what: &str, of: &dyn Fn(&Speeds) -> &Rounds| {
            let row = Row::new(format!("guest: {what}"), "GiB/s", of(ebb));
            report.row(row.against(other.keeper.name(), of(other)));
        };
        row("reclaim touched", &|speeds| &speeds.touched);
        if other.keeper != Keeper::Reporting {
            row("reclaim untouched", &|speeds| &speeds.untouched);
            row("return", &|speeds| &speeds.returned);
            row("return + install", &|speeds| &speeds.install);
        }
    }
    Ok(())
}

impl Speeds {
    fn round(&mut self, vm: &Vm) -> anyhow::Result<()> {
        vm.guest(&format!("fill a {FILL_MIB}M"));
        let before = vm.host_bytes();
        // Free page reporting begins with this.
        vm.guest("free a");
        let begun = Instant::now();
        self.keeper.shrink(vm, SMALL_MIB);
        let host_has = || vm.host_bytes() + WANTED_MIB * MIB <= before;
        self.touched.push(speed(WANTED_MIB, begun, host_has)?);
        if self.keeper == Keeper::Reporting {
            return Ok(());
        }
        self.wait(vm, SMALL_MIB)?;
        self.returned.push(self.resize(vm, MEMORY_MIB)?);
        self.untouched.push(self.resize(vm, SMALL_MIB)?);
        let begun = Instant::now();
        self.keeper.grow(vm, MEMORY_MIB);
        self.wait(vm, MEMORY_MIB)?;
        vm.guest(&format!("fill a {FILL_MIB}M"));
        let filled = begun.elapsed();
        self.install.push((FILL_MIB * MIB) as f64 / GIB as f64 / filled.as_secs_f64());
        vm.guest("free a");
        Ok(())
    }

    fn resize(&self, vm: &Vm, mib: u64) -> anyhow::Result<f64> {
        let begun = Instant::now();
        self.keeper.shrink(vm, mib);
        speed(MEMORY_MIB - SMALL_MIB, begun, || self.keeper.has_reached(vm, mib))
    }

    fn wait(&self, vm: &Vm, mib: u64) -> anyhow::Result<()> {
        speed(0, Instant::now(), || self.keeper.has_reached(vm, mib)).map(drop)
    }
}

/// Returns GiB/s from `begun` until `is_done`.
fn speed(mib: u64, begun: Instant, is_done: impl Fn() -> bool) -> anyhow::Result<f64> {
    while !is_done() && begun.elapsed() < DEADLINE {
        interrupt::check()?;
        std::thread::sleep(LOOK_EVERY);
    }
    Ok((mib * MIB) as f64 / GIB as f64 / begun.elapsed().as_secs_f64())
}
