//! Table 2, figures 5 and 6: a guest's memory bandwidth and its processors' work, sampled
//! while its VM is made smaller and larger, by each way to do so.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use vmtest::{Host, Vm};

use super::keeper::{self, Keeper, Setup};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::guard::guard;
use crate::interrupt;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 2048;
const SMALL_MIB: u64 = 640;
/// Of the 1st percentile without a change.
const GOAL: f64 = 0.99;
/// Nearly all memory was used before, as the paper has it.
const FILL: &str = "fill a 1400M";
const KEEPERS: [Keeper; 5] =
    [Keeper::HyperAlloc, Keeper::Balloon, Keeper::Reporting, Keeper::VirtioMem, Keeper::VProbe];
/// Of the guest program, with its unit.
const LOADS: [(&str, &str); 2] = [("stream", "MiB/s"), ("quanta", "steps/125 ms")];

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

    /// Of load, number of threads.
    fn kinds(&self) -> impl Iterator<Item = (usize, u32)> {
        let threads = self.threads;
        (0..LOADS.len()).flat_map(move |load| threads.iter().map(move |&threads| (load, threads)))
    }
}

/// Seconds from the beginning, and what the guest managed.
type Samples = Vec<(f64, f64)>;

/// One load with one keeper.
struct Run {
    keeper: Keeper,
    load: usize,
    threads: u32,
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
    let new = |(load, threads)| {
        let (still, resized) = (Rounds::default(), Rounds::default());
        Run { keeper, load, threads, still, resized, course: Vec::new() }
    };
    let mut runs: Vec<Run> = scale.kinds().map(new).collect();
    for _ in 0..scale.rounds {
        for run in &mut runs {
            run.round(&vm, scale)?;
        }
    }
    Ok(runs)
}

impl Run {
    fn round(&mut self, vm: &Vm, scale: &Scale) -> anyhow::Result<()> {
        let still = self.samples(vm, scale)?;
        self.still.push(first_percentile(&still));
        vm.guest(FILL);
        vm.guest("free a");
        let began = Instant::now();
        let resize = || -> anyhow::Result<()> {
            wait_until(began + scale.shrink_at())?;
            self.keeper.shrink(vm, SMALL_MIB);
            wait_until(began + scale.grow_at())?;
            self.keeper.grow(vm, MEMORY_MIB);
            Ok(())
        };
        let (samples, resized) = thread::scope(|scope| {
            let resize = scope.spawn(|| guard(resize));
            (guard(|| self.samples(vm, scale)), resize.join())
        });
        resized.map_err(|panic| crate::guard::reason(&*panic))??;
        self.course = samples?;
        self.resized.push(first_percentile(&self.course));
        Ok(())
    }

    fn samples(&self, vm: &Vm, scale: &Scale) -> anyhow::Result<Samples> {
        let load = LOADS[self.load].0;
        let text = vm.guest(&format!("bench {load} {} {}", self.threads, scale.seconds));
        parse(&text).with_context(|| format!("the guest's samples: {text}"))
    }

    fn name(&self) -> String {
        format!("{}, {} threads", LOADS[self.load].0, self.threads)
    }
}

fn wait_until(moment: Instant) -> anyhow::Result<()> {
    while Instant::now() < moment {
        interrupt::check()?;
        let left = moment.saturating_duration_since(Instant::now());
        thread::sleep(left.min(Duration::from_millis(100)));
    }
    Ok(())
}

/// `MILLISECONDS:FIGURE ...`.
fn parse(text: &str) -> Option<Samples> {
    let sample = |word: &str| {
        let (ms, figure) = word.split_once(':')?;
        Some((ms.parse::<f64>().ok()? / 1e3, figure.parse().ok()?))
    };
    text.split_whitespace().map(sample).collect()
}

/// The figure that a hundredth of the samples do not exceed.
fn first_percentile(samples: &[(f64, f64)]) -> f64 {
    let mut figures: Vec<f64> = samples.iter().map(|sample| sample.1).collect();
    figures.sort_unstable_by(f64::total_cmp);
    figures.get(figures.len().div_ceil(100).saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

fn rows(report: &mut Report, runs: &[Run]) {
    for run in runs {
        let what = format!("{}, {}", run.name(), run.keeper.name());
        let row = Row::new(what, LOADS[run.load].1, &run.resized).against("no change", &run.still);
        report.row(if run.keeper == Keeper::HyperAlloc { row.at_least(GOAL) } else { row });
    }
}

/// The most threads.
fn plot(report: &Report, scale: &Scale, runs: &[Run]) -> anyhow::Result<()> {
    let threads = scale.threads.iter().copied().max().unwrap_or(1);
    let panel = |load: usize| {
        let of = runs.iter().filter(|run| (run.load, run.threads) == (load, threads));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_percentile_is_the_slowest_hundredth() {
        let text: Vec<String> = (1..=200).rev().map(|figure| format!("7:{figure}")).collect();
        let samples = parse(&text.join(" ")).unwrap();
        assert_eq!((samples[0].0, first_percentile(&samples)), (0.007, 2.0));
        assert!(parse("7").is_none() && first_percentile(&[]).is_nan());
    }
}
