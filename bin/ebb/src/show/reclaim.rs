//! Free memory that was reclaimed, and by what.

use ebb_api::{AutoStatus, Mechanism, ReclaimReport, VmName, VmStatus};
use ebb_units::Bytes;

use super::{row, times};
use crate::interval::readable;

/// Returns whether automatic reclaim is on, and what it did last.
pub fn auto_rows(auto: &AutoStatus) -> String {
    let every = readable(auto.interval_ms.saturating_mul(1_000_000));
    let state = match auto.on {
        true => {
            format!("on, every {every}, keeps {} free besides the reserve", Bytes(auto.keep_bytes))
        }
        false => "off".into(),
    };
    let until = |why: &String| format!("{why}; until then nothing is reclaimed");
    let stuck = auto.stuck.as_ref().map(|why| row("blocked by", until(why)));
    row("state", state)
        + &stuck.unwrap_or_default()
        + &auto.last.as_ref().map(|last| row("last", report(last))).unwrap_or_default()
}

fn report(report: &ReclaimReport) -> String {
    format!(
        "reclaimed {} in {}; stopped by: {}",
        Bytes(report.bytes),
        readable(report.duration_ns),
        report.stopped_by
    )
}

/// Returns what one reclaim did.
pub fn reclaimed(name: &VmName, report: &ReclaimReport) -> String {
    let skipped = report.skipped;
    [
        format!("{name}: reclaimed {} in {} blocks\n", Bytes(report.bytes), report.blocks),
        row("time", readable(report.duration_ns)),
        row("scan, of that", readable(report.scan_ns)),
        row("stopped by", &report.stopped_by),
        row("in use", format!("{} blocks at the second look", skipped.in_use)),
        row("empty", format!("{} blocks already", skipped.already_empty)),
        row("cancelled", format!("{} blocks by the guest's own writes", skipped.cancelled)),
    ]
    .concat()
}

/// Returns the settings of automatic reclaim, with a headline.
pub fn auto(name: &VmName, status: &AutoStatus) -> String {
    format!("{name}: automatic reclaim\n") + &auto_rows(status)
}

/// Returns the lines of the allocator that the guest shares, or nothing if it shares none.
pub fn sharing(vm: &VmStatus) -> String {
    let shared = &vm.sharing;
    if vm.mechanism != Mechanism::HyperAlloc && shared.size_bytes.is_none() {
        return String::new();
    }
    let size = Bytes(shared.size_bytes.unwrap_or(vm.memory_bytes));
    let gone = format!(
        "{} hard (until returned), {} soft (until touched)",
        Bytes(shared.hard_bytes),
        Bytes(shared.soft_bytes)
    );
    let installs = format!("{}, {}", shared.installs, times(shared.install_ns));
    let violations = format!("{} ({})", shared.violations, shared.on_violation);
    let kinds = shared.fragmentation.map(|all| {
        [("unmovable", all.unmovable), ("movable", all.movable), ("huge", all.huge)].map(
            |(kind, bytes)| {
                let [used, huge] = [bytes.used_bytes, bytes.huge_bytes].map(Bytes);
                row(kind, format!("{used} in use, in {huge} of huge frames"))
            },
        )
    });
    [
        "\nshared allocator\n".into(),
        row("size", size),
        row("reclaimed", gone),
        row("installs", installs),
        row("violations", violations),
        kinds.map(|rows| rows.concat()).unwrap_or_default(),
        shared.stopped.as_ref().map(|why| row("stopped", why)).unwrap_or_default(),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_automatic_reclaim_from_its_work_is_told() {
        let why = "the guest is not trusted: it is still booting";
        let auto = |stuck: Option<&str>| AutoStatus {
            on: true,
            interval_ms: 5000,
            keep_bytes: 0,
            last: None,
            stuck: stuck.map(str::to_owned),
        };
        assert!(auto_rows(&auto(Some(why))).contains(&format!("blocked by    {why}; until then")));
        assert!(!auto_rows(&auto(None)).contains("blocked by"));
    }
}
