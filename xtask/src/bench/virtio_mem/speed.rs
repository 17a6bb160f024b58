//! Figures 7 and 8: a guest's memory bandwidth and its processors' work while its VM is made
//! smaller.

use std::time::Duration;

use vmtest::{Guest, Vm};

use super::way::Way;
use super::{KERNEL, MOVABLE, reach, resize};
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::samples::{self, LOADS, Load, Sampled, wait_until};
use crate::bench::session::Session;
use crate::plot::Figure;

struct Scale {
    small_mib: u64,
    large_mib: u64,
    rounds: usize,
    seconds: u64,
}

/// The paper's guest gives 8 GiB.
const FULL: Scale = Scale { small_mib: 2048, large_mib: 10240, rounds: 5, seconds: 40 };
const QUICK: Scale = Scale { small_mib: 1024, large_mib: 3072, rounds: 1, seconds: 20 };

impl Scale {
    fn shrink_at(&self) -> Duration {
        Duration::from_secs(self.seconds) / 4
    }
}

/// Runs it.
///
/// # Errors
/// The VM does not grow.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
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
        runs.extend(measure(way, &scale)?.into_iter().map(|sampled| (way, sampled)));
    }
    for (way, Sampled { load, still, changed, .. }) in &runs {
        let what = format!("{}, {}", load.name(), way.name());
        report.row(Row::new(what, load.unit(), changed).against("no change", still));
    }
    plot(&report, &scale, &runs)?;
    Ok(report)
}

fn measure(way: Way, scale: &Scale) -> anyhow::Result<Vec<Sampled>> {
    let guest = Guest::debian(KERNEL).append(MOVABLE).cpus(2);
    let vm = way.start(guest, scale.small_mib, scale.large_mib);
    let load = |index| Load { index, threads: 1, seconds: scale.seconds };
    let mut runs: Vec<Sampled> = (0..LOADS.len()).map(load).map(Sampled::new).collect();
    for _ in 0..scale.rounds {
        runs.iter_mut().try_for_each(|run| round(run, &vm, scale))?;
    }
    Ok(runs)
}

fn round(run: &mut Sampled, vm: &Vm, scale: &Scale) -> anyhow::Result<()> {
    reach(vm, &format!("{}M", scale.large_mib))?;
    vm.guest(&format!("fill a {}M", scale.large_mib - 512));
    vm.guest("free a");
    run.sample_still(vm)?;
    run.sample_while(vm, |began| {
        wait_until(began + scale.shrink_at())?;
        // How far it comes is another figure's question.
        resize(vm, &format!("{}M", scale.small_mib)).map(drop)
    })
}

fn plot(report: &Report, scale: &Scale, runs: &[(Way, Sampled)]) -> anyhow::Result<()> {
    let panel = |index: usize| {
        let of = runs.iter().filter(|(_, run)| run.load.index == index);
        let series = of.map(|(way, run)| run.series(way.name())).collect();
        let marks = [(scale.shrink_at(), "smaller")];
        samples::panel(index, LOADS[index].0.into(), series, &marks)
    };
    let title = "A guest's speed while its VM is made smaller (virtio-mem, fig. 7, 8)";
    let (x_label, y_label) = ("s", "");
    let panels = [panel(0), panel(1)];
    report.plot(&Figure { title, x_label, y_label, panels: &panels })
}
