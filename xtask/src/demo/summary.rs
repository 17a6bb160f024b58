//! Both rounds side by side, as a table and as a picture.

use std::path::Path;
use std::time::Duration;

use ebb_units::Bytes;

use super::curve::{gib, gib_seconds, mean_gib, peak_gib};
use super::round::{Record, Rounds};
use crate::plot::{self, Figure, Panel, Series};

/// A line of the table: its label, and its text for a round.
type Row = (&'static str, fn(&Record) -> String);

const ROWS: [Row; 20] = [
    ("accelerator and RAM", |record| {
        format!("{}, {}", record.vm.accelerator.as_str(), record.vm.backing.as_str())
    }),
    ("Ebb's mode", |record| of_ebb(record, |ebb| ebb.status.mode.as_str().into())),
    ("the guest's memory", |record| in_gib(gib(record.vm.memory_bytes))),
    ("used by the guest, mean", |record| in_gib(mean_gib(&record.guest.used))),
    ("resident, mean", |record| in_gib(mean_gib(&record.resident))),
    ("resident, peak", |record| in_gib(peak_gib(&record.resident))),
    ("resident, over time", |record| format!("{:.1} GiB s", gib_seconds(&record.resident))),
    ("free and still resident, mean", |record| in_gib(idle_gib(record))),
    ("returned to the host", |record| {
        of_ebb(record, |ebb| in_gib(gib(ebb.status.reclaimed_total_bytes)))
    }),
    ("supplied on the guest's touch", |record| in_gib(gib(supplied_bytes(record)))),
    ("reclaiming took", |record| of_ebb(record, |ebb| in_seconds(ebb.took))),
    ("in rounds", |record| of_ebb(record, |ebb| ebb.count.to_string())),
    ("faults that Ebb served", |record| {
        of_ebb(record, |ebb| {
            let faults = ebb.status.faults;
            (faults.missing + faults.metadata).to_string()
        })
    }),
    ("page faults of QEMU", |record| record.vmm.faults.to_string()),
    ("processor time of QEMU", |record| in_seconds(record.vmm.processor)),
    ("of that in the host's kernel", |record| in_seconds(record.vmm.kernel)),
    ("QEMU waited for a processor", |record| in_seconds(record.vmm.waited)),
    ("processor time of ebbd", |record| of_ebb(record, |_| in_seconds(record.daemon.processor))),
    ("the guest's work took", |record| in_seconds(record.guest.busy)),
    ("wrong bytes of those checked", |record| {
        format!("{} of {}", record.guest.wrong_bytes, Bytes(record.guest.checked_bytes))
    }),
];

fn in_seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn in_gib(gib: f64) -> String {
    format!("{gib:.2} GiB")
}

fn of_ebb(record: &Record, tell: impl Fn(&Rounds) -> String) -> String {
    record.ebb.as_ref().map_or("-".into(), tell)
}

/// Returns the mean memory that the host gives and the guest does not use, in GiB.
fn idle_gib(record: &Record) -> f64 {
    mean_gib(&record.resident) - mean_gib(&record.guest.used)
}

/// Returns the host memory that the guest got by touching its own, for the first time or again, in
/// bytes.
fn supplied_bytes(record: &Record) -> u64 {
    let ends = record.resident.first().zip(record.resident.last());
    let grown = ends.map_or(0, |(first, last)| last.1.saturating_sub(first.1));
    record.ebb.as_ref().map_or(grown, |ebb| ebb.status.returned_total_bytes)
}

/// Returns the table.
pub fn table(records: &[Record]) -> String {
    let cells =
        |cells: Vec<String>| cells.iter().map(|cell| format!("{cell:>18}")).collect::<String>();
    let labels = records.iter().map(|record| record.keeper.label().to_owned()).collect();
    let head = format!("{:<32}{}\n", "", cells(labels));
    let rows = ROWS
        .iter()
        .map(|(label, tell)| format!("{label:<32}{}\n", cells(records.iter().map(tell).collect())));
    head + &rows.collect::<String>()
}

/// Returns the result in a line or two.
pub fn verdict(without: &Record, with: &Record) -> String {
    let (before, after) = (mean_gib(&without.resident), mean_gib(&with.resident));
    let checked_bytes = without.guest.checked_bytes + with.guest.checked_bytes;
    let wrong_bytes = without.guest.wrong_bytes + with.guest.wrong_bytes;
    let less_percent = (before - after) / before.max(f64::MIN_POSITIVE) * 100.0;
    format!(
        "With Ebb the same work took {after:.2} GiB of the host's memory on average \
         instead of {before:.2} GiB: {less_percent:.0} % less.\n\
         The guest checked every byte of {}: {wrong_bytes} wrong.\n",
        Bytes(checked_bytes),
    )
}

/// Draws the picture into the file at `path`.
///
/// # Errors
/// The file cannot be written.
pub fn draw(path: &Path, records: &[Record]) -> anyhow::Result<()> {
    let panels: Vec<Panel> = records.iter().map(panel).collect();
    plot::draw(
        path,
        &Figure {
            title: "Host memory under a 2 GiB guest that fills and frees its memory",
            x_label: "time [s]",
            y_label: "memory [GiB]",
            panels: &panels,
        },
    )
}

fn panel(record: &Record) -> Panel {
    let points = |points: &[(Duration, u64)]| {
        points.iter().map(|&(at, bytes)| (at.as_secs_f64(), gib(bytes))).collect::<Vec<_>>()
    };
    let limit = gib(record.vm.memory_bytes);
    let series = |name: &str, points, is_bound| Series { name: name.into(), points, is_bound };
    let stages = record.guest.stages.iter();
    Panel {
        y_label: None,
        title: title(record),
        series: vec![
            series("used by the guest", points(&record.guest.used), false),
            series("resident on the host", points(&record.resident), false),
            series("limit", vec![(0.0, limit), (record.time.as_secs_f64(), limit)], true),
        ],
        between: Some("free in the guest, still resident".into()),
        marks: stages.map(|&(at, label)| (at.as_secs_f64(), label.into())).collect(),
    }
}

fn title(record: &Record) -> String {
    let (label, mean) = (record.keeper.label(), mean_gib(&record.resident));
    format!("{label}: resident {mean:.2} GiB on average")
}
