//! Figures 7 and 8: a guest's memory bandwidth and its processors' work while its VM shrinks.

use std::time::Duration;

use vmtest::Guest;

use super::mechanism::Mechanism;
use super::{KERNEL, MOVABLE, reach, resize};
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::samples::{self, LOADS, Load, wait_until};
use crate::bench::session::Session;
use crate::plot::Figure;

const NAME: &str = "virtio-mem-fig7";

struct Scale {
    small_mib: u64,
    large_mib: u64,
    /// VMs of each mechanism.
    blocks: usize,
    seconds: u64,
}

/// The paper's guest gives 8 GiB.
const FULL: Scale = Scale { small_mib: 2048, large_mib: 10240, blocks: 2, seconds: 40 };
const QUICK: Scale = Scale { small_mib: 1024, large_mib: 3072, blocks: 1, seconds: 20 };

impl Scale {
    fn loads(&self) -> impl Iterator<Item = Load> {
        let seconds = self.seconds;
        (0..LOADS.len()).map(move |index| Load { index, threads: 1, seconds })
    }

    fn shrink_at(&self) -> Duration {
        Duration::from_secs(self.seconds) / 4
    }
}

/// Runs the benchmark.
///
/// # Errors
/// The VM does not grow.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let scale = if session.identity.quick { QUICK } else { FULL };
    report.note(format!(
        "1st percentiles of the samples of {} s, {} VMs of each mechanism: ebb is with the VM made smaller \
         ({} of {} MiB, which were used and freed before) at {} s, other without, in the same VM.",
        scale.seconds,
        scale.blocks,
        scale.small_mib,
        scale.large_mib,
        scale.shrink_at().as_secs(),
    ));
    let mechanisms = Mechanism::here(&mut report);
    let sides = (&mechanisms[..], |mechanism: Mechanism| mechanism.name().to_owned());
    let taken = blocks.take(&mut report, "smaller", sides, scale.blocks, |mechanism| {
        measure(mechanism, &scale)
    })?;
    for mechanism in mechanisms {
        for load in scale.loads() {
            report.row(samples::row(&taken, mechanism.name(), load));
        }
    }
    plot(&report, &scale, &taken)?;
    Ok(report)
}

fn measure(mechanism: Mechanism, scale: &Scale) -> anyhow::Result<Figures> {
    let guest = Guest::debian(KERNEL).append(MOVABLE).cpus(2);
    let vm = mechanism.start(guest, scale.small_mib, scale.large_mib);
    let mut figures = Figures::new();
    for load in scale.loads() {
        reach(&vm, &format!("{}M", scale.large_mib))?;
        // What the guest's kernel takes for itself differs by mechanism.
        vm.guest(&format!("fill a {}M", scale.large_mib / 10 * 9));
        vm.guest("free a");
        samples::sample(
            &mut figures,
            load,
            &vm,
            || Ok(()),
            |began| {
                wait_until(began + scale.shrink_at())?;
                // Another figure measures how far the VM shrinks.
                resize(&vm, &format!("{}M", scale.small_mib)).map(drop)
            },
        )?;
    }
    Ok(figures)
}

fn plot(report: &Report, scale: &Scale, taken: &Taken) -> anyhow::Result<()> {
    let panel = |load: Load| {
        let series = taken.names().map(|name| samples::series(taken, name, load)).collect();
        let marks = [(scale.shrink_at(), "smaller")];
        samples::panel(load.index, LOADS[load.index].0.into(), series, &marks)
    };
    let title = "A guest's speed while its VM is made smaller (virtio-mem, fig. 7, 8)";
    let (x_label, y_label) = ("s", "");
    let panels: Vec<_> = scale.loads().map(panel).collect();
    report.plot(&Figure { title, x_label, y_label, panels: &panels })
}
