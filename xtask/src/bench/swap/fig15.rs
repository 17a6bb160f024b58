//! Figure 15: the blocks that Ebb knows by content, and the page cache, whose pages may be
//! disk-backed.

use std::path::Path;

use anyhow::Context;

use super::keeper::Keeper;
use super::medium::Medium;
use super::rig::{self, Rig};
use super::setup::Setup;
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::sweep;
use crate::bench::work;
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 1024;
const IMAGE_BYTES: u64 = 900 << 20;
const PART_BYTES: u64 = 50 << 20;
const PARTS: u64 = 8;
const MIB: f64 = (1 << 20) as f64;

/// Returns the guest's steps, in order.
fn steps() -> Vec<String> {
    let read = |part: u64| format!("timed read /mnt/part{part}");
    let mut steps: Vec<String> = (0..PARTS).map(read).collect();
    steps.push("fill a 300M".into());
    steps.push("dropcaches".into());
    steps.extend((0..PARTS / 2).map(read));
    steps.push("files b 100M /mnt".into());
    steps.push("free a".into());
    steps.push("fsync /mnt/b.pattern".into());
    steps.push("rmfiles b".into());
    steps.extend((0..PARTS).map(read));
    steps
}

/// Figures after one step, in bytes.
struct Sample {
    /// The disk's blocks that Ebb knows by content.
    tracked: f64,
    /// The guest's page cache, without dirty pages.
    clean: f64,
}

/// Runs the benchmark.
///
/// # Errors
/// The host lacks what it needs.
pub fn run(_session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new("vswapper-fig15");
    let directory = sweep::scratch()?;
    let image = rig::image(directory.path(), IMAGE_BYTES, parts)?;
    let setup = Setup::new(Keeper::Ebb, Medium::Ssd, [MEMORY_MIB; 2], &image);
    let rig = Rig::start(&setup)?;
    let mut samples = Vec::new();
    for step in steps() {
        rig.vm.guest(&step);
        samples.push(sample(&rig)?);
    }
    // Steps of one course are no rounds.
    let mean = |figure: fn(&Sample) -> f64| -> Rounds {
        [samples.iter().map(figure).sum::<f64>() / samples.len() as f64].into_iter().collect()
    };
    let tracked = mean(|sample| sample.tracked);
    let row = Row::new("blocks known by content, mean of all steps", "MiB", &tracked);
    report.row(row.against("the clean page cache", &mean(|sample| sample.clean)));
    let series = |name: &str, figure: fn(&Sample) -> f64| Series {
        name: name.into(),
        points: (1..).zip(&samples).map(|(x, sample)| (f64::from(x), figure(sample))).collect(),
        is_bound: false,
    };
    let series = vec![
        series("blocks known by content", |sample| sample.tracked),
        series("clean page cache", |sample| sample.clean),
    ];
    report.plot(&Figure {
        title: "Blocks known, and the guest's page cache (VSwapper, fig. 15)",
        x_label: "step",
        y_label: "MiB",
        panels: &[Panel { series, ..Panel::default() }],
    })?;
    Ok(report)
}

fn parts(at: &Path) -> anyhow::Result<()> {
    (0..PARTS).try_for_each(|part| work::random_file(&at.join(format!("part{part}")), PART_BYTES))
}

fn sample(rig: &Rig) -> anyhow::Result<Sample> {
    let meminfo = rig.vm.guest("cat /proc/meminfo");
    let kib = |key: &str| -> anyhow::Result<f64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key));
        let word = line.and_then(|rest| rest.split_whitespace().next());
        Ok(word.with_context(|| format!("no {key} in the guest"))?.parse()?)
    };
    let clean = kib("Cached:")? - kib("Shmem:")? - kib("Dirty:")?;
    let tracked = rig.vm.status().limit.tracked_blocks as f64 * 4096.0 / MIB;
    Ok(Sample { tracked, clean: clean / 1024.0 })
}
