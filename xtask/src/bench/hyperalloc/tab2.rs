//! Table 2, figures 5 and 6: a guest's memory bandwidth and its processors' work, sampled
//! while its VM is made smaller and larger, by each way to do so.

use std::time::Duration;

use vmtest::{Host, Vm};

use super::keeper::{self, Keeper, Setup};
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::samples::{self, LOADS, Load, Sampled, wait_until};
use crate::bench::session::Session;
use crate::plot::Figure;

const MEMORY_MIB: u64 = 2048;
const SMALL_MIB: u64 = 640;
/// Of the 1st percentile without a change.
const GOAL: f64 = 0.99;
/// Nearly all memory was used before, as the paper has it.
const FILL: &str = "fill a 1400M";
const KEEPERS: [Keeper; 5] =
    [Keeper::HyperAlloc, Keeper::Balloon, Keeper::Reporting, Keeper::VirtioMem, Keeper::VProbe];

struct Scale {
    rounds: usize,
    threads: &'static [u32],
    seconds: u64,
}

const FULL: Scale = Scale { rounds: 5, threads: &[1, 2], seconds: 20 };
const QUICK: Scale = Scale { rounds: 2, threads: &[1], seconds: 20 };

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

/// Runs it.
///
/// # Errors
/// There is no such kernel.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("hyperalloc-tab2");
    let scale = if quick { QUICK } else { FULL };
    keeper::note_kernels(&mut report)?;
    report.note(format!(
        "1st percentiles of the samples of {} s, {} rounds: ebb is with the VM made smaller \
         ({SMALL_MIB} of {MEMORY_MIB} MiB) at {shrink} s and larger at {} s, other without, in \
         the same VM. Free page reporting takes what is free from the beginning on, V-Probe (one \
         reclaim) at {shrink} s.",
        scale.seconds,
        scale.rounds,
        scale.grow_at().as_secs(),
        shrink = scale.shrink_at().as_secs(),
    ));
    let mut runs = Vec::new();
    for keeper in KEEPERS {
        runs.extend(measure(keeper, &scale)?.into_iter().map(|sampled| (keeper, sampled)));
    }
    rows(&mut report, &runs);
    plot(&report, &scale, &runs)?;
    Ok(report)
}

fn measure(keeper: Keeper, scale: &Scale) -> anyhow::Result<Vec<Sampled>> {
    let setup = Setup { memory_mib: MEMORY_MIB, cpus: 2, image: None };
    let vm = keeper.start(&Host::new(), &setup);
    let mut runs: Vec<Sampled> = scale.loads().map(Sampled::new).collect();
    for _ in 0..scale.rounds {
        runs.iter_mut().try_for_each(|run| round(run, keeper, &vm, scale))?;
    }
    Ok(runs)
}

fn round(run: &mut Sampled, keeper: Keeper, vm: &Vm, scale: &Scale) -> anyhow::Result<()> {
    run.sample_still(vm)?;
    vm.guest(FILL);
    vm.guest("free a");
    run.sample_while(vm, |began| {
        wait_until(began + scale.shrink_at())?;
        keeper.shrink(vm, SMALL_MIB);
        wait_until(began + scale.grow_at())?;
        keeper.grow(vm, MEMORY_MIB);
        Ok(())
    })
}

fn rows(report: &mut Report, runs: &[(Keeper, Sampled)]) {
    for (keeper, Sampled { load, still, changed, .. }) in runs {
        let what = format!("{}, {}", load.name(), keeper.name());
        let row = Row::new(what, load.unit(), changed).against("no change", still);
        report.row(if *keeper == Keeper::HyperAlloc { row.at_least(GOAL) } else { row });
    }
}

/// The most threads.
fn plot(report: &Report, scale: &Scale, runs: &[(Keeper, Sampled)]) -> anyhow::Result<()> {
    let threads = scale.threads.iter().copied().max().unwrap_or(1);
    let panel = |index: usize| {
        let of =
            runs.iter().filter(|(_, run)| (run.load.index, run.load.threads) == (index, threads));
        let series = of.map(|(keeper, run)| run.series(keeper.name())).collect();
        let marks = [(scale.shrink_at(), "smaller"), (scale.grow_at(), "larger")];
        samples::panel(index, format!("{}, {threads} threads", LOADS[index].0), series, &marks)
    };
    let title = "A guest's speed while its VM is made smaller and larger (HyperAlloc, fig. 5, 6)";
    let (x_label, y_label) = ("s", "");
    let panels = [panel(0), panel(1)];
    report.plot(&Figure { title, x_label, y_label, panels: &panels })
}
