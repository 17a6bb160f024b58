//! Free memory that was reclaimed, and by what.

use ebb_api::{
    AutoStatus, BELOW_PERCENT_DEFAULT, Mechanism, PressureStatus, ReclaimReport, ReclaimWhen,
    VmName, VmStatus,
};
use ebb_units::Bytes;

use super::{row, times};
use crate::interval::readable;

/// Returns whether automatic reclaim is on, and what it did last.
pub fn auto_rows(auto: &AutoStatus) -> String {
    let keeps = Bytes(auto.keep_bytes);
    let state = match auto.on {
        true => format!("on, {}, leaves {keeps} free, or more", when(auto)),
        false => "off".into(),
    };
    let until = |why: &String| format!("{why}; until then nothing is reclaimed");
    let stuck = auto.stuck.as_ref().map(|why| row("blocked by", until(why)));
    let pressure = auto.pressure.as_ref().filter(|_| auto.on);
    row("state", state)
        + &stuck.unwrap_or_default()
        + &pressure.map(|pressure| pressure_rows(auto, pressure)).unwrap_or_default()
        + &auto.last.as_ref().map(|last| row("last", report(last))).unwrap_or_default()
}

/// Returns what begins a round.
pub fn when(auto: &AutoStatus) -> String {
    match (auto.when, auto.below_bytes) {
        (ReclaimWhen::Interval, _) => every(auto),
        (ReclaimWhen::Pressure, Some(bytes)) => {
            format!("while the host has less than {} available", Bytes(bytes))
        }
        (ReclaimWhen::Pressure, None) => {
            let percent = auto.below_percent.unwrap_or(BELOW_PERCENT_DEFAULT);
            format!("while the host has less than {percent} % of its memory available")
        }
    }
}

fn every(auto: &AutoStatus) -> String {
    format!("every {}", readable(auto.interval_ms.saturating_mul(1_000_000)))
}

/// Returns by what host pressure is seen, and when it last began a round.
fn pressure_rows(auto: &AutoStatus, pressure: &PressureStatus) -> String {
    let seen_by = match &pressure.seen_by {
        Some(seen_by) => seen_by.clone(),
        None => {
            format!("ebbd does not watch the host; after 30 s of that, a round {}", every(auto))
        }
    };
    let last = match (&pressure.why, pressure.age_s) {
        (Some(why), Some(age_s)) => {
            format!("{} rounds, the last {age_s} s ago: {why}", pressure.rounds)
        }
        _ => "no round yet".into(),
    };
    row("seen by", seen_by) + &row("pressure", last)
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

/// Returns the section of a VM's status about the allocator that the guest shares, or nothing if it
/// shares none.
pub fn allocator_section(vm: &VmStatus) -> String {
    let shared = &vm.sharing;
    if vm.mechanism != Mechanism::HyperAlloc && shared.size_bytes.is_none() {
        return String::new();
    }
    let size = Bytes(shared.size_bytes.unwrap_or(vm.memory_bytes));
    let reclaimed = format!(
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
        row("reclaimed", reclaimed),
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

    fn auto() -> AutoStatus {
        AutoStatus {
            on: true,
            when: ReclaimWhen::Interval,
            interval_ms: 5000,
            below_percent: None,
            below_bytes: None,
            keep_bytes: 0,
            last: None,
            stuck: None,
            pressure: None,
        }
    }

    #[test]
    fn the_blocked_reason_of_automatic_reclaim_is_shown() {
        let why = "the guest is not trusted: it is still booting";
        let auto = |stuck: Option<&str>| AutoStatus { stuck: stuck.map(str::to_owned), ..auto() };
        assert!(auto_rows(&auto(Some(why))).contains(&format!("blocked by    {why}; until then")));
        assert!(!auto_rows(&auto(None)).contains("blocked by"));
    }

    #[test]
    fn the_cause_of_a_round_is_shown() {
        let told = auto_rows(&auto());
        assert!(told.contains("on, every 5 s, leaves 0 B free"), "{told}");
        let pressure = PressureStatus { seen_by: None, rounds: 0, why: None, age_s: None };
        let auto = AutoStatus {
            when: ReclaimWhen::Pressure,
            below_percent: Some(10),
            pressure: Some(pressure),
            ..auto()
        };
        let told = auto_rows(&auto);
        assert!(told.contains("on, while the host has less than 10 % of its memory"), "{told}");
        assert!(told.contains("ebbd does not watch the host; after 30 s"), "{told}");
        assert!(told.contains("a round every 5 s") && told.contains("no round yet"), "{told}");
        let pressure = PressureStatus {
            seen_by: Some("available memory".into()),
            rounds: 3,
            why: Some("host: available 1 GiB below 2 GiB".into()),
            age_s: Some(7),
        };
        let (below_percent, below_bytes) = (None, Some(2 << 30));
        let auto = AutoStatus { below_percent, below_bytes, pressure: Some(pressure), ..auto };
        let told = auto_rows(&auto);
        assert!(told.contains("on, while the host has less than 2 GiB available"), "{told}");
        assert!(told.contains("seen by       available memory\n"), "{told}");
        assert!(told.contains("3 rounds, the last 7 s ago: host: available 1 GiB"), "{told}");
    }
}
