//! Traces: what the pilot saw, a line of JSON for each look. `ebb record` writes them, and `ebb
//! simulate` shows what the pilot would decide.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use ebb_api::{PilotSight, SeenPlugged, SeenVm, VmClass};
use ebb_policy::need::MemoryFigures;
use ebb_policy::pilot::{
    Class, CompressedSight, Decision, HostRule, HostSight, Pilot, PluggedSight, Stage, VmRule,
    VmSight,
};
use ebb_policy::pressure::{Budget, HostMemory};

/// Longest line of a trace: a look at some ten thousand VMs.
const LINE_BYTES: u64 = 16 << 20;

/// The pilot looks at everything once a second. What it saw sooner after that, it saw while it
/// looked for VMs that miss memory.
const WHOLE_EVERY_MS: u64 = 900;

/// A decision of the pilot, and when it would be made.
pub struct Simulated {
    /// Time since the trace's first look, in milliseconds.
    pub at_ms: u64,
    pub stage: Stage,
    pub decision: Decision,
}

/// A trace that is being written.
pub struct Writer {
    file: File,
    last_ms: Option<u64>,
    pub looks: u64,
}

impl Writer {
    /// Begins a trace.
    ///
    /// # Errors
    /// The file exists, or cannot be made.
    pub fn new(path: &Path) -> anyhow::Result<Writer> {
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        let advice = || format!("{}: give a new file, in a directory that exists", path.display());
        let file = file.with_context(advice)?;
        Ok(Writer { file, last_ms: None, looks: 0 })
    }

    /// Adds a look, unless the trace has it already.
    pub fn add(&mut self, sight: &PilotSight) -> anyhow::Result<()> {
        if self.last_ms != Some(sight.at_ms) {
            let line = serde_json::to_string(sight)? + "\n";
            // A trace that is cut off has whole lines.
            self.file.write_all(line.as_bytes()).context("the trace")?;
            (self.last_ms, self.looks) = (Some(sight.at_ms), self.looks + 1);
        }
        Ok(())
    }
}

/// Replays a trace through the policy. Decisions change nothing in it: each look is as it was.
///
/// # Errors
/// The file cannot be read, or a line of it makes no sense.
pub fn simulate(path: &Path, rule: HostRule) -> anyhow::Result<Vec<Simulated>> {
    let mut file = BufReader::new(File::open(path).with_context(|| path.display().to_string())?);
    let (mut pilot, mut all) = (Pilot::default(), Vec::new());
    let (mut first, mut last) = (None, 0);
    let mut whole_at: Option<u64> = None;
    for number in 1.. {
        let mut line = String::new();
        let place = || format!("{}, line {number}", path.display());
        std::io::Read::take(&mut file, LINE_BYTES).read_line(&mut line).with_context(place)?;
        if line.is_empty() {
            break;
        }
        let sight: PilotSight = serde_json::from_str(&line).with_context(place)?;
        let (memory, vms) = seen(sight.clone()).with_context(place)?;
        let host = HostSight { memory: &memory, swap_bytes: sight.swap_bytes };
        let first = *first.get_or_insert(sight.at_ms);
        if sight.at_ms < last.max(first) {
            bail!("{}: its time is before that of the line before", place());
        }
        last = sight.at_ms;
        let at_ms = sight.at_ms - first;
        let now = Duration::from_millis(at_ms);
        let decisions = match whole_at {
            Some(whole) if at_ms - whole < WHOLE_EVERY_MS => pilot.relieve(now, rule, host, &vms),
            _ => {
                whole_at = Some(at_ms);
                pilot.look(now, rule, host, &vms)
            }
        };
        let stage = pilot.stage();
        all.extend(decisions.into_iter().map(|decision| Simulated { at_ms, stage, decision }));
    }
    match first {
        None => bail!("{} is empty: ebb record makes a trace", path.display()),
        Some(_) => Ok(all),
    }
}

fn seen(sight: PilotSight) -> anyhow::Result<(HostMemory, Vec<VmSight>)> {
    let bound = |bound: ebb_api::SeenBound| Budget {
        name: bound.name,
        total_bytes: bound.total_bytes,
        available_bytes: bound.available_bytes,
    };
    let mut bounds = sight.bounds.into_iter().map(bound);
    let host = bounds.next().context("`bounds` is empty: the host's memory comes first in it")?;
    let groups = bounds.collect();
    let host = HostMemory { host, groups, stall_permille: sight.stall_permille };
    Ok((host, sight.vms.into_iter().map(vm).collect()))
}

fn vm(vm: SeenVm) -> VmSight {
    let class = match vm.class {
        VmClass::Batch => Class::Batch,
        VmClass::Normal => Class::Normal,
        VmClass::Latency => Class::Latency,
    };
    VmSight {
        name: vm.name.to_string(),
        rule: VmRule {
            min_bytes: vm.min_bytes,
            max_bytes: vm.max_bytes,
            weight: vm.weight,
            class,
            is_held: vm.hold,
        },
        memory_bytes: vm.memory_bytes,
        resident_bytes: vm.resident_bytes,
        floor_bytes: vm.floor_bytes,
        limit_bytes: vm.limit_bytes,
        spare_bytes: vm.spare_bytes,
        working_bytes: vm.working_bytes,
        refaulted_bytes: vm.refaulted_bytes,
        compressed: vm.compressed_most_bytes.map(|most_bytes| CompressedSight {
            bytes: vm.compressed_bytes,
            most_bytes,
            own_bytes: vm.compressed_own_bytes,
        }),
        guest: { vm.guest_total_bytes }
            .zip(vm.guest_available_bytes)
            .map(|(total_bytes, available_bytes)| MemoryFigures { total_bytes, available_bytes }),
        plugged: vm.plugged.map(plugged),
        waits: vm.waits,
        may_reclaim: vm.may_reclaim,
        may_limit: vm.may_limit,
    }
}

fn plugged(plugged: SeenPlugged) -> PluggedSight {
    let SeenPlugged { bytes, asked_bytes, full_bytes, block_bytes, may_unplug } = plugged;
    PluggedSight { bytes, asked_bytes, full_bytes, block_bytes, may_unplug }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    use ebb_policy::pressure::Below;

    const GIB: u64 = 1 << 30;
    const RULE: HostRule =
        HostRule { reserve: Below::Percent(10), stall_permille: None, swap_max_bytes: None };

    fn sight(at_ms: u64, available_bytes: u64) -> PilotSight {
        let host =
            ebb_api::SeenBound { name: "host".into(), total_bytes: 16 * GIB, available_bytes };
        let web = SeenVm {
            name: "web".parse().unwrap(),
            class: VmClass::Normal,
            weight: 100,
            min_bytes: None,
            max_bytes: None,
            hold: false,
            memory_bytes: 4 * GIB,
            resident_bytes: 4 * GIB,
            floor_bytes: GIB / 8,
            limit_bytes: None,
            spare_bytes: 2 * GIB,
            working_bytes: None,
            refaulted_bytes: 0,
            compressed_bytes: 0,
            compressed_most_bytes: None,
            compressed_own_bytes: 0,
            guest_total_bytes: None,
            guest_available_bytes: None,
            plugged: None,
            waits: false,
            may_reclaim: true,
            may_limit: true,
        };
        let (bounds, vms) = (vec![host], vec![web]);
        PilotSight { at_ms, bounds, stall_permille: None, swap_bytes: 0, vms }
    }

    fn simulated(lines: &[String]) -> Result<Vec<String>, String> {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("trace");
        fs::write(&path, lines.concat()).unwrap();
        let all = simulate(&path, RULE)
            .map_err(|error| format!("{error:#}").replace(&*path.to_string_lossy(), "trace"))?;
        Ok(all.iter().map(|one| format!("{} {} {}", one.at_ms, one.stage, one.decision)).collect())
    }

    fn line(sight: &PilotSight) -> String {
        serde_json::to_string(sight).unwrap() + "\n"
    }

    #[test]
    fn what_was_written_is_replayed() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("trace");
        let mut writer = Writer::new(&path).unwrap();
        for sight in [sight(5000, 8 * GIB), sight(5000, 8 * GIB), sight(16_000, GIB)] {
            writer.add(&sight).unwrap();
        }
        assert_eq!(writer.looks, 2, "the same look is written once");
        let again = Writer::new(&path).err().unwrap().to_string();
        assert!(again.contains("give a new file"), "{again}");
        let all = simulate(&path, RULE).unwrap();
        let kinds: Vec<(u64, String)> =
            all.iter().map(|one| (one.at_ms, one.stage.to_string())).collect();
        assert_eq!(kinds[0], (0, "ample".into()), "free memory beyond what it keeps");
        assert_eq!(kinds[1], (11_000, "short".into()));
    }

    /// A batch VM to which so much has come back, on a tight host.
    fn missing(at_ms: u64, refaulted_mib: u64) -> String {
        let mut sight = sight(at_ms, 3 * GIB);
        let web = &mut sight.vms[0];
        (web.class, web.spare_bytes) = (VmClass::Batch, 0);
        (web.resident_bytes, web.limit_bytes) = (2 * GIB, Some(2 * GIB));
        web.refaulted_bytes = refaulted_mib << 20;
        line(&sight)
    }

    /// It has its part of each second by the first look that sees its need.
    #[test]
    fn a_need_between_two_seconds_is_met_by_then() {
        let trace = [(0, 0), (300, 100), (600, 200), (1000, 300), (1200, 300), (1400, 400)];
        let lines = trace.map(|(at_ms, refaulted_mib)| missing(at_ms, refaulted_mib));
        let all = simulated(&lines).expect("decisions");
        let relief = all.iter().filter(|one| one.contains("came back within seconds"));
        let times: Vec<&str> = relief.filter_map(|one| one.split(' ').next()).collect();
        assert_eq!(times, ["300", "1000"], "{all:?}");
        let mut taken = all.iter().filter(|one| !one.contains("came back"));
        assert!(taken.all(|one| one.starts_with("0 tight ")), "{all:?}");
    }

    /// A normal VM that misses memory, and a latency VM with this limit to which so much has come
    /// back, on a short host.
    fn needy(second: u64, (limit_mib, refaulted_mib): (u64, u64)) -> String {
        let mut sight = sight(second * 1000, GIB);
        let web = &mut sight.vms[0];
        web.spare_bytes = 0;
        (web.resident_bytes, web.limit_bytes) = (2 * GIB, Some(2 * GIB));
        web.refaulted_bytes = second * (100 << 20);
        let mut calm = web.clone();
        (calm.name, calm.class) = ("calm".parse().unwrap(), VmClass::Latency);
        (calm.resident_bytes, calm.limit_bytes) = (limit_mib << 20, Some(limit_mib << 20));
        (calm.working_bytes, calm.refaulted_bytes) = (Some(4 * GIB), refaulted_mib << 20);
        sight.vms.push(calm);
        line(&sight)
    }

    /// The first second only tells what had come back before.
    #[test]
    fn a_latency_vm_that_misses_nothing_is_probed_until_it_misses_something() {
        let seen = |second: u64| match second {
            0 | 1 => (4096, 0),
            2 => (4055, 0),
            3 => (3973, 0),
            4 => (3809, 50),
            _ => (4013, 50),
        };
        let lines: Vec<String> = (0..15).map(|second| needy(second, seen(second))).collect();
        let all = simulated(&lines).expect("decisions");
        let times = |why: &str| -> Vec<String> {
            let of_calm = |one: &&String| one.contains("calm: limit ") && one.contains(why);
            let time = |one: &String| one.split(' ').next().unwrap_or_default().to_owned();
            all.iter().filter(of_calm).map(time).collect()
        };
        assert_eq!(times("since another VM misses"), ["1000", "2000", "3000", "14000"], "{all:?}");
        assert_eq!(times("came back within seconds"), ["4000"], "{all:?}");
    }

    #[test]
    fn a_line_that_makes_no_sense_is_named() {
        let good = line(&sight(5, GIB));
        let cases = [
            (vec![], "trace is empty"),
            (vec![good.clone(), "{}\n".into()], "trace, line 2: missing field `at_ms`"),
            (vec![good.clone(), line(&sight(4, GIB))], "trace, line 2: its time is before"),
            (
                vec![good.replace("\"weight\"", "\"height\"")],
                "trace, line 1: unknown field `height`",
            ),
            (vec![line(&PilotSight { bounds: vec![], ..sight(0, 0) })], "`bounds` is empty"),
            (vec!["\u{0}".into()], "trace, line 1: "),
        ];
        for (lines, why) in cases {
            let refused = simulated(&lines).expect_err(why);
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn figures_that_cannot_be_harm_nobody() {
        let mut hostile = sight(u64::MAX, u64::MAX);
        hostile.bounds[0].total_bytes = 0;
        for vm in &mut hostile.vms {
            (vm.memory_bytes, vm.resident_bytes, vm.limit_bytes) = (u64::MAX, u64::MAX, Some(0));
            (vm.weight, vm.spare_bytes, vm.refaulted_bytes) = (0, u64::MAX, u64::MAX);
            (vm.min_bytes, vm.max_bytes, vm.working_bytes) =
                (Some(u64::MAX), Some(0), Some(u64::MAX));
            (vm.compressed_bytes, vm.compressed_most_bytes) = (u64::MAX, Some(u64::MAX));
            vm.compressed_own_bytes = u64::MAX;
            (vm.guest_total_bytes, vm.guest_available_bytes) = (Some(u64::MAX), Some(0));
            vm.plugged = Some(SeenPlugged {
                bytes: u64::MAX,
                asked_bytes: 1,
                full_bytes: u64::MAX,
                block_bytes: 0,
                may_unplug: true,
            });
        }
        let mut short = hostile.clone();
        (short.bounds[0].total_bytes, short.bounds[0].available_bytes) = (u64::MAX, 0);
        simulated(&[line(&hostile), line(&short)]).expect("decisions, whatever they are");
    }
}
