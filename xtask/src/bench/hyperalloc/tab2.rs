//! Table 2, figures 5 and 6: a guest's memory bandwidth and its processors' work, sampled while its
//! VM shrinks and grows by each keeper.

use std::time::Duration;

use vmtest::Host;

use super::keeper::{self, Keeper, Setup};
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::samples::{self, LOADS, Load, wait_until};
use crate::bench::session::Session;
use crate::plot::Figure;

const MEMORY_MIB: u64 = 2048;
const SMALL_MIB: u64 = 640;
/// Goal: least 1st percentile, as a ratio to that without a change of the size.
const GOAL: f64 = 0.99;
/// Command that uses nearly all memory beforehand, as in the paper.
const FILL: &str = "fill a 1400M";
const NAME: &str = "hyperalloc-tab2";
/// The keeper with a goal, and the others, each with its number of VMs.
const CASES: [(&[Keeper], usize); 2] = [
    (&[Keeper::HyperAlloc], 5),
    (&[Keeper::Balloon, Keeper::Reporting, Keeper::VirtioMem, Keeper::VProbe], 2),
];

struct Scale {
    threads: &'static [u32],
    seconds: u64,
}

const FULL: Scale = Scale { threads: &[1, 2], seconds: 20 };
const QUICK: Scale = Scale { threads: &[1], seconds: 20 };

impl Scale {
    fn shrink_at(&self) -> Duration {
        Duration::from_secs(self.seconds) / 5
    }

    fn grow_at(&self) -> Duration {
        Duration::from_secs(self.seconds) * 3 / 5
    }

    fn loads(&self) -> impl Iterator<Item = Load> {
        let Scale { threads, seconds, .. } = *self;
        let each =
            move |index| threads.iter().map(move |&threads| Load { index, threads, seconds });
        (0..LOADS.len()).flat_map(each)
    }
}

/// Runs the benchmark.
///
/// # Errors
/// There is no such kernel.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new(NAME);
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let scale = if quick { QUICK } else { FULL };
    keeper::note_kernels(&mut report)?;
    report.note(format!(
        "1st percentiles of the samples of {} s: ebb is with the VM made smaller ({SMALL_MIB} of \
         {MEMORY_MIB} MiB) at {shrink} s and larger at {} s, other without, in the same VM. Free page \
         reporting takes what is free from the beginning on, V-Probe (one reclaim) at {shrink} s.",
        scale.seconds,
        scale.grow_at().as_secs(),
        shrink = scale.shrink_at().as_secs(),
    ));
    let mut all = Vec::new();
    for ((keepers, count), case) in CASES.into_iter().zip(["HyperAlloc", "others"]) {
        let count = if quick { 1 } else { count };
        let sides = (keepers, |keeper: Keeper| keeper.name().to_owned());
        let taken =
            blocks.take(&mut report, case, sides, count, |keeper| measure(keeper, &scale))?;
        rows(&mut report, &scale, keepers, &taken);
        all.push(taken);
    }
    plot(&report, &scale, &all)?;
    Ok(report)
}

fn measure(keeper: Keeper, scale: &Scale) -> anyhow::Result<Figures> {
    let setup = Setup { memory_mib: MEMORY_MIB, cpus: 2, image: None };
    let vm = keeper.start(&Host::new(), &setup);
    let mut figures = Figures::new();
    let ready = || {
        vm.guest(FILL);
        vm.guest("free a");
        Ok(())
    };
    for load in scale.loads() {
        samples::sample(&mut figures, load, &vm, ready, |began| {
            wait_until(began + scale.shrink_at())?;
            keeper.shrink(&vm, SMALL_MIB);
            wait_until(began + scale.grow_at())?;
            keeper.grow(&vm, MEMORY_MIB);
            Ok(())
        })?;
    }
    Ok(figures)
}

fn rows(report: &mut Report, scale: &Scale, keepers: &[Keeper], taken: &Taken) {
    for (keeper, load) in
        keepers.iter().flat_map(|keeper| scale.loads().map(move |load| (keeper, load)))
    {
        let row = samples::row(taken, keeper.name(), load);
        report.row(match keeper {
            Keeper::HyperAlloc => row.failed(taken.failed()).at_least(GOAL),
            _ => row,
        });
    }
}

/// Draws the samples with the most threads.
fn plot(report: &Report, scale: &Scale, all: &[Taken]) -> anyhow::Result<()> {
    let threads = scale.threads.iter().copied().max().unwrap_or(1);
    let panel = |index: usize| {
        let load = Load { index, threads, seconds: scale.seconds };
        let of = |taken: &Taken| -> Vec<_> {
            taken.names().map(|name| samples::series(taken, name, load)).collect()
        };
        let series = all.iter().flat_map(of).collect();
        let marks = [(scale.shrink_at(), "smaller"), (scale.grow_at(), "larger")];
        samples::panel(index, format!("{}, {threads} threads", LOADS[index].0), series, &marks)
    };
    let title = "A guest's speed while its VM is made smaller and larger (HyperAlloc, fig. 5, 6)";
    let (x_label, y_label) = ("s", "");
    let panels = [panel(0), panel(1)];
    report.plot(&Figure { title, x_label, y_label, panels: &panels })
}
