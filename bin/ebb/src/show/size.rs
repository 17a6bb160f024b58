//! The size of a VM, and what changes it.

use ebb_api::{
    BalloonStatus, MemoryDeviceStatus, ResizeReport, SizeMechanism, SizeState, SizeStatus, VmName,
};
use ebb_units::Bytes;

use super::{known, row};
use crate::interval::readable;
use crate::progress::bar;

/// Returns the section of a VM's status about the guest's size. A VM that has its initial size, no
/// target and no memory device shows only its balloon.
pub fn section(size: &SizeStatus, held: Option<&BalloonStatus>) -> String {
    let differs = size.bytes != size.initial_bytes || size.wanted_bytes.is_some();
    let rows = match differs || !size.devices.is_empty() {
        true => size_rows(size),
        false => String::new(),
    };
    let rows = rows + &held.map(balloon).unwrap_or_default();
    if rows.is_empty() { rows } else { "\nsize\n".to_owned() + &rows }
}

fn size_rows(size: &SizeStatus) -> String {
    let [bytes, max, initial, plugged, ballooned, hard] = [
        size.bytes,
        size.max_bytes,
        size.initial_bytes,
        size.plugged_bytes,
        size.ballooned_bytes,
        size.hard_bytes,
    ]
    .map(Bytes);
    let made_of = format!(
        "{initial} at the beginning, {plugged} plugged; less {ballooned} ballooned, {hard} \
         hard-reclaimed"
    );
    let stopped = size.stopped_by.as_ref().map(|why| row("blocked by", why));
    let devices: String = size.devices.iter().map(device).collect();
    row("guest has", format!("{bytes}, at most {max}"))
        + &row("made of", made_of)
        + &row("target", target(size))
        + &stopped.unwrap_or_default()
        + &devices
}

fn target(size: &SizeStatus) -> String {
    let Some(bytes) = size.wanted_bytes else { return "none: it stays as it is".into() };
    let node = size.wanted_node.map(|node| format!(" on node {node}")).unwrap_or_default();
    let by = size.mechanism.map(|by| format!(" by {by}")).unwrap_or_default();
    format!("{}{node}{by}: {}", Bytes(bytes), size.state)
}

fn device(device: &MemoryDeviceStatus) -> String {
    let [plugged, requested, max, block] =
        [device.plugged_bytes, device.requested_bytes, device.max_bytes, device.block_bytes]
            .map(Bytes);
    let touches = match device.violations.unwrap_or(0) {
        0 => String::new(),
        count => format!("; {count} touches of unplugged memory"),
    };
    let text = format!(
        "{plugged} of {max} plugged, {requested} requested, in blocks of {block}; driver {}, served \
         by {}{touches}",
        device.driver, device.served_by
    );
    row(&format!("node {}", device.node), text)
}

fn balloon(balloon: &BalloonStatus) -> String {
    let reporting = match (balloon.reporting_offered, balloon.reporting) {
        (false, _) => "off",
        (true, Some(true)) => "on",
        (true, Some(false)) => "not used by the guest",
        (true, None) => "offered",
    };
    let holds = format!(
        "{}; driver {}; deflates on OOM: {}; deflated by Ebb under pressure: {} times; free page reporting: \
         {reporting}",
        Bytes(balloon.ballooned_bytes),
        balloon.driver,
        if balloon.deflates_on_oom { "yes" } else { "no" },
        balloon.releases
    );
    let figures = balloon.figures.map(|stats| {
        let [total, free, available, cache] =
            [stats.total_bytes, stats.free_bytes, stats.available_bytes, stats.cache_bytes]
                .map(known);
        let text = format!(
            "{available} available of {total}: {free} free, {cache} page cache; {} s ago",
            stats.age_s
        );
        row("guest says", text)
    });
    row("balloon", holds) + &figures.unwrap_or_default()
}

/// Returns the progress of a resize in one line. `first`: its first report.
pub fn resizing(name: &VmName, first: &ResizeReport, report: &ResizeReport) -> String {
    let (now, wanted) = (Bytes(report.bytes), Bytes(report.wanted_bytes));
    let way = first.bytes.abs_diff(report.wanted_bytes);
    let done = way.saturating_sub(report.bytes.abs_diff(report.wanted_bytes));
    let (bar, time) = (bar(done, way), readable(report.duration_ns));
    format!("{name}: {bar}  {now}, target {wanted}, by {}, {time}", report.mechanism)
}

/// Returns what a resize did.
pub fn resized(name: &VmName, report: &ResizeReport) -> String {
    let (now, wanted) = (Bytes(report.bytes), Bytes(report.wanted_bytes));
    if report.state == SizeState::Off {
        return format!("{name} stays at {now}: {}\n", report.stopped_by);
    }
    let node = report.node.map(|node| format!(" on node {node}")).unwrap_or_default();
    [
        format!("{name}: has {now}{node}, target {wanted}\n"),
        row("by", format!("{}: {}", report.mechanism, report.reason)),
        row("state", report.state),
        report.least_bytes.map(|least| row("needs", Bytes(least))).unwrap_or_default(),
        row(
            "from guest",
            format!(
                "{}; {} of host memory became free",
                Bytes(report.taken_bytes),
                Bytes(report.emptied_bytes)
            ),
        ),
        row("to guest", Bytes(report.returned_bytes)),
        match report.mechanism {
            SizeMechanism::HyperAlloc => row("purges", report.purges),
            _ => String::new(),
        },
        row("time", readable(report.duration_ns)),
        row("stopped by", &report.stopped_by),
    ]
    .concat()
}
