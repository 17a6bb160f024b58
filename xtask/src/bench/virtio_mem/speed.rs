//! Figures 7 and 8: a guest's memory bandwidth and its processors' work while its VM is made
//! smaller.

use std::time::Duration;

use vmtest::{Guest, Vm};

use super::way::Way;
use super::{KERNEL, MOVABLE, reach, resize};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::bench::samples::{LOADS, Load, Samples, first_percentile, wait_until};
use crate::plot::{Figure, Panel, Series};

struct Scale {
    small_mib: u64,
    large_mib: u64,
    rounds: usize,
    seconds: u64,
}

/// The paper's guest gives 8 GiB.
const FULL: Scale = Scale { small_mib: 2048, large_mib: 10240, rounds: 3, seconds: 40 };
const QUICK: Scale = Scale { small_mib: 1024, large_mib: 3072, rounds: 1, seconds: 20 };

impl Scale {
    fn shrink_at(&self) -> Duration {
        Duration::from_secs(self.seconds) / 4
    }
}

/// One load by one way.
struct Run {
    way: Way,
    load: Load,
    still: Rounds,
    resized: Rounds,
    /// Of the last round.
    course: Samples,
}

/// Runs it.
///
/// # Errors
/// The VM does not grow.
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("virtio-mem-fig7");
    let scale = if quick { QUICK } else { FULL };
    report.note(format!(
        "1st percentiles of the samples of {} s, {} rounds: ebb is with the VM made smaller \
         ({} of {} MiB, which were used and freed before) at {} s, other without, in the same VM.",
        scale.seconds,
        scale.rounds,
        scale.small_mib,
        scale.large_mib,
        scale.shrink_at().as_secs(),
    ));
    let mut runs = Vec::new();
    for way in Way::here(&mut report) {
        runs.extend(measure(way, &scale)?);
    }
    for Run { way, load, still, resized, .. } in &runs {
        let what = format!("{}, {}", load.name(), way.name());
        report.row(Row::new(what, load.unit(), resized).against("no change", still));
    }
    plot(&report, &scale, &runs)?;
    Ok(report)
}

fn measure(way: Way, scale: &Scale) -> anyhow::Result<Vec<Run>> {
    let guest = Guest::debian(KERNEL).append(MOVABLE).cpus(2);
    let vm = way.start(guest, scale.small_mib, scale.large_mib);
    let new = |index| {
        let load = Load { index, threads: 1, seconds: scale.seconds };
        Run { way, load, still: Rounds::default(), resized: Rounds::default(), course: Vec::new() }
    };
    let mut runs: Vec<Run> = (0..LOADS.len()).map(new).collect();
    for _ in 0..scale.rounds {
        for run in &mut runs {
            run.round(&vm, scale)?;
        }
    }
    Ok(runs)
}

impl Run {
    fn round(&mut self, vm: &Vm, scale: &Scale) -> anyhow::Result<()> {
        reach(vm, &format!("{}M", scale.large_mib))?;
        vm.guest(&format!("fill a {}M", scale.large_mib - 512));
        vm.guest("free a");
        self.still.push(first_percentile(&self.load.samples(vm)?));
        self.course = self.load.samples_while(vm, |began| {
            wait_until(began + scale.shrink_at())?;
            // How far it comes is another figure's question.
            resize(vm, &format!("{}M", scale.small_mib)).map(drop)
        })?;
        self.resized.push(first_percentile(&self.course));
        Ok(())
    }
}

fn plot(report: &Report, scale: &Scale, runs: &[Run]) -> anyhow::Result<()> {
    let panel = |index: usize| {
        let of = runs.iter().filter(|run| run.load.index == index);
        let series = of.map(|run| Series {
            name: run.way.name().into(),
            points: run.course.clone(),
            is_bound: false,
        });
        Panel {
            title: LOADS[index].0.into(),
            y_label: Some(LOADS[index].1.into()),
            series: series.collect(),
            marks: vec![(scale.shrink_at().as_secs_f64(), "smaller".into())],
            ..Panel::default()
        }
    };
    let title = "A guest's speed while its VM is made smaller (virtio-mem, fig. 7, 8)";
    let (x_label, y_label) = ("s", "");
    let panels = [panel(0), panel(1)];
    report.plot(&Figure { title, x_label, y_label, panels: &panels }).map(drop)
}
