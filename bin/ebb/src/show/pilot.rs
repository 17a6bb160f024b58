//! The pilot, and what it decided.

use std::iter;
use std::time::Duration;

use ebb_api::{PilotDecision, PilotMode, PilotStatus, PilotVm};
use ebb_units::Bytes;

use super::{known, limit_or_none, row, table};
use crate::trace::Simulated;

/// Returns the pilot's settings, the host, a line for each VM, and the last decisions.
pub fn pilot(pilot: &PilotStatus) -> String {
    let mode = match pilot.mode {
        PilotMode::On => "on",
        PilotMode::DryRun => "dry run: it decides and does nothing",
        PilotMode::Off => {
            "off: `ebb pilot on` turns it on, `ebb pilot dry-run` shows what it would do"
        }
    };
    let reserve = match (pilot.reserve_bytes, pilot.reserve_percent) {
        (Some(bytes), _) => Bytes(bytes).to_string(),
        (None, percent) => format!("{} % of memory", percent.unwrap_or(0)),
    };
    let host = match (&pilot.stage, &pilot.host) {
        (Some(stage), Some(host)) => row("host", format!("{stage}; {host}")),
        _ => String::new(),
    };
    let attach = match pilot.attach {
        true => row("attach", "VMs that run on the host and can be managed"),
        false => String::new(),
    };
    let stall = pilot.stall_percent.map(|percent| match percent {
        0 => row("stall", "waiting tasks do not count"),
        percent => row("stall", format!("tasks may wait for {percent} % of the time")),
    });
    let swap = pilot.swap_max_bytes.map(|bytes| {
        let most = Bytes(bytes);
        row("swap", format!("nothing in use is taken while swap files take {most} or more"))
    });
    row("pilot", mode)
        + &row("reserve", reserve)
        + &stall.unwrap_or_default()
        + &swap.unwrap_or_default()
        + &attach
        + &host
        + &vms(pilot)
        + &decisions(pilot)
}

fn vms(pilot: &PilotStatus) -> String {
    if pilot.vms.is_empty() {
        return "\nno VM is managed\n".into();
    }
    let names = [
        "NAME",
        "CLASS",
        "WEIGHT",
        "MIN",
        "MAX",
        "MEMORY",
        "RESIDENT",
        "WORKS WITH",
        "LIMIT",
        "COMPR",
    ];
    let lines: Vec<[String; 10]> =
        iter::once(names.map(String::from)).chain(pilot.vms.iter().map(vm)).collect();
    let alone = pilot.vms.iter().filter_map(|vm| {
        let why = if vm.hold { Some("held: ebb rule NAME --hold off ends that") } else { None };
        let why = why.or(vm.left_alone.as_deref())?.replace("NAME", vm.name.as_str());
        Some(row(vm.name.as_str(), format!("its limit is left alone: {why}")))
    });
    let unplugged = pilot.vms.iter().filter(|vm| vm.unplugged_bytes > 0).map(|vm| {
        let bytes = Bytes(vm.unplugged_bytes);
        row(vm.name.as_str(), format!("its guest has unplugged {bytes} for the pilot"))
    });
    format!("\n{}{}", table(&lines), alone.chain(unplugged).collect::<String>())
}

fn vm(vm: &PilotVm) -> [String; 10] {
    let [memory, resident] =
        [vm.memory_bytes, vm.resident_bytes].map(|bytes| Bytes(bytes).to_string());
    [
        vm.name.to_string(),
        vm.class.to_string(),
        vm.weight.to_string(),
        limit_or_none(vm.min_bytes),
        limit_or_none(vm.max_bytes),
        memory,
        resident,
        known(vm.working_bytes),
        limit_or_none(vm.limit_bytes),
        limit_or_none(vm.compressed_most_bytes.filter(|bytes| *bytes > 0)),
    ]
}

fn decisions(pilot: &PilotStatus) -> String {
    if pilot.decisions.is_empty() {
        return String::new();
    }
    "\nlast decisions\n".to_owned() + &pilot.decisions.iter().map(decision).collect::<String>()
}

fn decision(decision: &PilotDecision) -> String {
    let age = Duration::from_millis(decision.age_ms).as_secs();
    let outcome = decision.outcome.as_deref().unwrap_or("under way");
    let PilotDecision { vm, action, why, .. } = decision;
    row(&format!("{age} s ago"), format!("{vm}: {action} ({why}): {outcome}"))
}

/// Returns a line for each decision of a replayed trace.
pub fn simulated(all: &[Simulated]) -> String {
    if all.is_empty() {
        return "the pilot would have done nothing\n".into();
    }
    let line = |one: &Simulated| {
        let seconds = one.at_ms as f64 / 1000.0;
        format!("{seconds:8.1} s  {:<9}{}\n", one.stage.to_string(), one.decision)
    };
    all.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_api::{PilotStage, VmClass};

    fn status() -> PilotStatus {
        let web = PilotVm {
            name: "web".parse().unwrap(),
            class: VmClass::Latency,
            weight: 100,
            min_bytes: None,
            max_bytes: Some(2 << 30),
            hold: false,
            memory_bytes: 4 << 30,
            resident_bytes: 1 << 30,
            working_bytes: None,
            limit_bytes: Some(3 << 29),
            compressed_most_bytes: Some(512 << 20),
            unplugged_bytes: 0,
            left_alone: None,
        };
        let db = PilotVm {
            name: "db".parse().unwrap(),
            unplugged_bytes: 1 << 30,
            left_alone: Some("ebb limit has set its limit: ebb limit NAME off ends that".into()),
            ..web.clone()
        };
        let decision = PilotDecision {
            number: 1,
            age_ms: 3999,
            vm: "web".parse().unwrap(),
            action: "limit none -> 1.5 GiB".into(),
            why: "cold memory".into(),
            outcome: Some("done".into()),
        };
        PilotStatus {
            mode: PilotMode::On,
            reserve_percent: Some(10),
            reserve_bytes: None,
            attach: false,
            stall_percent: Some(20),
            swap_max_bytes: Some(64 << 30),
            stage: Some(PilotStage::Tight),
            host: Some("host: available 3 GiB".into()),
            vms: vec![web, db],
            decisions: vec![decision],
        }
    }

    #[test]
    fn everything_is_shown() {
        let expected = "  pilot         on
  reserve       10 % of memory
  stall         tasks may wait for 20 % of the time
  swap          nothing in use is taken while swap files take 64 GiB or more
  host          tight; host: available 3 GiB

NAME  CLASS    WEIGHT  MIN   MAX    MEMORY  RESIDENT  WORKS WITH  LIMIT    COMPR
web   latency  100     none  2 GiB  4 GiB   1 GiB     unknown     1.5 GiB  512 MiB
db    latency  100     none  2 GiB  4 GiB   1 GiB     unknown     1.5 GiB  512 MiB
  db            its limit is left alone: ebb limit has set its limit: ebb limit db off ends that
  db            its guest has unplugged 1 GiB for the pilot

last decisions
  3 s ago       web: limit none -> 1.5 GiB (cold memory): done
";
        assert_eq!(pilot(&status()), expected);
    }

    #[test]
    fn a_pilot_that_is_off_says_how_it_is_turned_on() {
        let off = PilotStatus {
            mode: PilotMode::Off,
            stage: None,
            host: None,
            vms: Vec::new(),
            decisions: Vec::new(),
            ..status()
        };
        let text = pilot(&off);
        assert!(
            text.contains("`ebb pilot on` turns it on") && text.ends_with("no VM is managed\n")
        );
    }
}
