//! A guest's speed, sampled while something else happens to its VM.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use vmtest::Vm;

use super::kept::{Figures, add};
use super::row::Row;
use super::taken::Taken;
use crate::guard::guard;
use crate::interrupt;
use crate::plot::{Panel, Series};

/// The guest program's loads, each with its unit.
pub const LOADS: [(&str, &str); 2] = [("stream", "MiB/s"), ("quanta", "steps/125 ms")];

/// Samples: seconds from the beginning, and what the guest managed.
type Samples = Vec<(f64, f64)>;

/// What a guest does while it is sampled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Index in [`LOADS`].
    pub index: usize,
    pub threads: u32,
    pub seconds: u64,
}

impl Load {
    /// Returns the load's name in tables.
    pub fn name(self) -> String {
        format!("{}, {} threads", LOADS[self.index].0, self.threads)
    }

    /// Returns the unit of a sample.
    pub fn unit(self) -> &'static str {
        LOADS[self.index].1
    }

    /// Runs the load in the guest.
    ///
    /// # Errors
    /// The guest's answer is invalid.
    fn samples(self, vm: &Vm) -> anyhow::Result<Samples> {
        let (load, Load { threads, seconds, .. }) = (LOADS[self.index].0, self);
        let text = vm.guest(&format!("bench {load} {threads} {seconds}"));
        parse(&text).with_context(|| format!("the guest's samples: {text}"))
    }

    /// Runs the load while `change` runs on a thread of its own. `change` gets the time of the
    /// beginning.
    ///
    /// # Errors
    /// Those of [`Load::samples`], or those of `change`.
    fn samples_while(
        self,
        vm: &Vm,
        change: impl FnOnce(Instant) -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<Samples> {
        let began = Instant::now();
        let (samples, changed) = thread::scope(|scope| {
            let change = scope.spawn(move || guard(|| change(began)));
            (guard(|| self.samples(vm)), change.join())
        });
        changed.map_err(|panic| crate::guard::reason(&*panic))??;
        samples
    }
}

/// Samples one load of one VM, first without a change and then with one, which runs on a thread of
/// its own. Records the 1st percentiles, and the course with the change.
///
/// # Errors
/// The guest's answer is invalid, or those of `ready` and `change`.
pub fn sample(
    figures: &mut Figures,
    load: Load,
    vm: &Vm,
    ready: impl FnOnce() -> anyhow::Result<()>,
    change: impl FnOnce(Instant) -> anyhow::Result<()> + Send,
) -> anyhow::Result<()> {
    let name = load.name();
    add(figures, &still(&name), first_percentile(&load.samples(vm)?));
    ready()?;
    let course = load.samples_while(vm, change)?;
    add(figures, &changed(&name), first_percentile(&course));
    figures.insert(format!("{name}, s"), course.iter().map(|point| point.0).collect());
    figures.insert(format!("{name}, course"), course.iter().map(|point| point.1).collect());
    Ok(())
}

fn still(load: &str) -> String {
    format!("{load}, still")
}

fn changed(load: &str) -> String {
    format!("{load}, changed")
}

/// Makes a row of a side's speed with a change against that without one, in the same VMs.
pub fn row(taken: &Taken, side: &str, load: Load) -> Row {
    let name = load.name();
    let of = |figure: &str| taken.rounds(side, figure);
    let row = Row::new(format!("{name}, {side}"), load.unit(), &of(&changed(&name)));
    row.against_vms("no change", &of(&still(&name)))
}

/// Returns a side's curve with the change, from the last block.
pub fn series(taken: &Taken, side: &str, load: Load) -> Series {
    let name = load.name();
    let [x, y] = ["s", "course"].map(|part| taken.course(side, &format!("{name}, {part}")));
    Series { name: side.into(), points: x.into_iter().zip(y).collect(), is_bound: false }
}

/// Makes a panel of the last rounds of one of [`LOADS`], with marks of what happened when.
pub fn panel(
    index: usize,
    title: String,
    series: Vec<Series>,
    marks: &[(Duration, &str)],
) -> Panel {
    Panel {
        title,
        y_label: Some(LOADS[index].1.into()),
        series,
        marks: marks.iter().map(|&(at, what)| (at.as_secs_f64(), what.into())).collect(),
        ..Panel::default()
    }
}

/// Waits, unless somebody interrupts.
///
/// # Errors
/// Somebody interrupted.
pub fn wait_until(moment: Instant) -> anyhow::Result<()> {
    while Instant::now() < moment {
        interrupt::check()?;
        let left = moment.saturating_duration_since(Instant::now());
        thread::sleep(left.min(Duration::from_millis(100)));
    }
    Ok(())
}

/// Parses `MILLISECONDS:FIGURE ...`.
fn parse(text: &str) -> Option<Samples> {
    let sample = |word: &str| {
        let (ms, figure) = word.split_once(':')?;
        Some((ms.parse::<f64>().ok()? / 1e3, figure.parse().ok()?))
    };
    text.split_whitespace().map(sample).collect()
}

/// Returns the figure that a hundredth of the samples do not exceed.
fn first_percentile(samples: &[(f64, f64)]) -> f64 {
    let mut figures: Vec<f64> = samples.iter().map(|sample| sample.1).collect();
    figures.sort_unstable_by(f64::total_cmp);
    figures.get(figures.len().div_ceil(100).saturating_sub(1)).copied().unwrap_or(f64::NAN)
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
