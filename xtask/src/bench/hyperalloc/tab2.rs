//! Table 2, figures 5 and 6: a guest's memory bandwidth and its processors' work, sampled
//! while its VM is made smaller and larger, by each way to do so.

use std::time::Duration;

use vmtest::{Host, Vm};

use super::keeper::{self, Keeper, Setup};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::samples::{LOADS, Load, Samples, first_percentile, wait_until};
use crate::plot::{Figure, Panel, Series};

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

const FULL: Scale = Scale { rounds: 3, threads: &[1, 2], seconds: 40 };
const QUICK: Scale = Scale { rounds: 1, threads: &[1], seconds: 20 };

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

/// One load with one keeper.
struct Run {
    keeper: Keeper,
    load: Load,
    still: Rounds,
    resized: Rounds,
    /// Of the last round.
    course: Samples,
}

/// Runs it.
///
/// # Errors
/// There is no such kernel.
pub fn run(quick: bool) -> anyhow::Result<Report> {
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
        runs.extend(measure(keeper, &scale)?);
    }
    rows(&mut report, &runs);
    plot(&report, &scale, &runs)?;
    Ok(report)
}

fn measure(keeper: Keeper, scale: &Scale) -> anyhow::Result<Vec<Run>> {
    let setup = Setup { memory_mib: MEMORY_MIB, cpus: 2, image: None };
    let vm = keeper.start(&Host::new(), &setup);
    let new = |load| {
        let (still, resized) = (Rounds::default(), Rounds::default());
        Run { keeper, load, still, resized, course: Vec::new() }
    };
    let mut runs: Vec<Run> = scale.loads().map(new).collect();
    for _ in 0..scale.rounds {
        for run in &mut runs {
            run.round(&vm, scale)?;
        }
    }
    Ok(runs)
}

impl Run {
    fn round(&mut self, vm: &Vm, scale: &Scale) -> anyhow::Result<()> {
        self.still.push(first_percentile(&self.load.samples(vm)?));
        vm.guest(FILL);
        vm.guest("free a");
        self.course = self.load.samples_while(vm, |began| {
            wait_until(began + scale.shrink_at())?;
            self.keeper.shrink(vm, SMALL_MIB);
            wait_until(began + scale.grow_at())?;
            self.keeper.grow(vm, MEMORY_MIB);
            Ok(())
        })?;
        self.resized.push(first_percentile(&self.course));
        Ok(())
    }
}

fn rows(report: &mut Report, runs: &[Run]) {
    for run in runs {
        let what = format!("{}, {}", run.load.name(), run.keeper.name());
        let row = Row::new(what, run.load.unit(), &run.resized).against("no change", &run.still);
        report.row(if run.keeper == Keeper::HyperAlloc { row.at_least(GOAL) } else { row });
    }
}

/// The most threads.
fn plot(report: &Report, scale: &Scale, runs: &[Run]) -> anyhow::Result<()> {
    let threads = scale.threads.iter().copied().max().unwrap_or(1);
    let panel = |load: usize| {
        let of = runs.iter().filter(|run| (run.load.index, run.load.threads) == (load, threads));
        let series = of.map(|run| Series {
            name: run.keeper.name().into(),
            points: run.course.clone(),
            is_bound: false,
        });
        let moments = [(scale.shrink_at(), "smaller"), (scale.grow_at(), "larger")];
        Panel {
            title: format!("{}, {threads} threads", LOADS[load].0),
            y_label: Some(LOADS[load].1.into()),
            series: series.collect(),
            marks: moments.map(|(at, what)| (at.as_secs_f64(), what.into())).into(),
            ..Panel::default()
        }
    };
    let title = "A guest's speed while its VM is made smaller and larger (HyperAlloc, fig. 5, 6)";
    let (x_label, y_label) = ("s", "");
    let panels = [panel(0), panel(1)];
    report.plot(&Figure { title, x_label, y_label, panels: &panels }).map(drop)
}
