//! The pilot: Ebb decides by itself what it takes from which VM.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::request::ensure;
use crate::{BadRequest, PilotMode, PilotStage, VmClass, VmName};

/// The host's reserve until another one is set, in percent of its memory.
pub const RESERVE_PERCENT_DEFAULT: u32 = 10;
/// The largest reserve, in percent.
pub const RESERVE_PERCENT_MAX: u32 = 90;
/// The largest weight of a VM.
pub const WEIGHT_MAX: u32 = 10_000;

/// Turn the pilot on or off, or change its reserve. What is null stays as it is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PilotRequest {
    /// What the pilot does.
    #[serde(default)]
    pub mode: Option<PilotMode>,
    /// Memory that is to stay available on the host, in percent of it.
    #[serde(default)]
    pub reserve_percent: Option<u32>,
    /// The same in bytes; not together with the percentage.
    #[serde(default)]
    pub reserve_bytes: Option<u64>,
    /// Whether the pilot, while it is on, attaches VMs that run on the host and can be managed. It
    /// leaves those alone that were detached.
    #[serde(default)]
    pub attach: Option<bool>,
    /// Tasks of the host that wait for memory in this part of the time make the host short, in
    /// percent; 0: they do not count.
    #[serde(default)]
    pub stall_percent: Option<u32>,
    /// Nothing in use is taken while all swap files take this or more; 0: whatever they take.
    #[serde(default)]
    pub swap_max_bytes: Option<u64>,
}

impl PilotRequest {
    /// Checks all that needs no host.
    pub fn check(&self) -> Result<(), BadRequest> {
        ensure(self.reserve_percent.is_none() || self.reserve_bytes.is_none(), || {
            "a reserve is a size or a percentage, not both".into()
        })?;
        ensure(self.reserve_percent.is_none_or(|percent| percent <= RESERVE_PERCENT_MAX), || {
            format!(
                "a reserve of {} % leaves VMs too little: give {RESERVE_PERCENT_MAX}% or less",
                self.reserve_percent.unwrap_or(0)
            )
        })?;
        ensure(self.stall_percent.is_none_or(|percent| percent <= 100), || {
            format!(
                "tasks cannot wait for {} % of the time: give 0 to 100",
                self.stall_percent.unwrap_or(0)
            )
        })
    }
}

/// Change the pilot's rule for a VM. What is null stays as it is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleRequest {
    /// How much the VM's speed matters.
    #[serde(default)]
    pub class: Option<VmClass>,
    /// Resident memory below which nothing in use is taken from it; 0: what its guest needs to live.
    #[serde(default)]
    pub min_bytes: Option<u64>,
    /// Most resident memory; 0: all of its memory.
    #[serde(default)]
    pub max_bytes: Option<u64>,
    /// Its weight among VMs of its class, 1 to 10000.
    #[serde(default)]
    pub weight: Option<u32>,
    /// Whether the pilot leaves it as it is.
    #[serde(default)]
    pub hold: Option<bool>,
}

impl RuleRequest {
    /// Checks all that needs no VM.
    pub fn check(&self) -> Result<(), BadRequest> {
        ensure(self.weight.is_none_or(|weight| (1..=WEIGHT_MAX).contains(&weight)), || {
            format!(
                "a weight of {} is out of range: give 1 to {WEIGHT_MAX}",
                self.weight.unwrap_or(0)
            )
        })
    }
}

/// The pilot, what it sees and what it decided last.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PilotStatus {
    /// What the pilot does.
    pub mode: PilotMode,
    /// Memory that is to stay available on the host, in percent of it; null: the size counts.
    pub reserve_percent: Option<u32>,
    /// The same in bytes; null: the percentage counts.
    pub reserve_bytes: Option<u64>,
    /// Whether the pilot, while it is on, attaches VMs that run on the host and can be managed.
    #[serde(default)]
    pub attach: bool,
    /// The part of the time in which tasks of the host may wait for memory, in percent; 0: waits do
    /// not count; null: as the daemon's option has it.
    #[serde(default)]
    pub stall_percent: Option<u32>,
    /// Nothing in use is taken while all swap files take this or more; null: whatever they take.
    #[serde(default)]
    pub swap_max_bytes: Option<u64>,
    /// How short of memory the host is; null: the pilot has not looked yet, or is off.
    pub stage: Option<PilotStage>,
    /// The host's figures at the last look.
    pub host: Option<String>,
    /// The VMs, by name.
    pub vms: Vec<PilotVm>,
    /// The last decisions, the latest first.
    pub decisions: Vec<PilotDecision>,
}

/// A VM as the pilot sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PilotVm {
    /// The VM's name.
    #[schema(value_type = String)]
    pub name: VmName,
    /// How much its speed matters.
    pub class: VmClass,
    /// Its weight among VMs of its class.
    pub weight: u32,
    /// Resident memory below which nothing in use is taken; null: what its guest needs to live.
    pub min_bytes: Option<u64>,
    /// Most resident memory; null: all of its memory.
    pub max_bytes: Option<u64>,
    /// Whether the pilot leaves it as it is.
    pub hold: bool,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Host memory that it takes.
    pub resident_bytes: u64,
    /// What it works with; null: not known.
    pub working_bytes: Option<u64>,
    /// The limit that the pilot has given it; null: none.
    pub limit_bytes: Option<u64>,
    /// The most memory that its compressed pages may take, beside what the limit says; null: it can
    /// have none.
    #[serde(default)]
    pub compressed_most_bytes: Option<u64>,
    /// What the pilot has had its guest unplug.
    #[serde(default)]
    pub unplugged_bytes: u64,
    /// Why the pilot leaves its limit alone; null: nothing is in the way.
    pub left_alone: Option<String>,
}

/// A decision.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PilotDecision {
    /// Counts up with each decision of this daemon.
    pub number: u64,
    /// Time since then, in milliseconds.
    pub age_ms: u64,
    /// The VM's name.
    #[schema(value_type = String)]
    pub vm: VmName,
    /// What was decided, in words.
    pub action: String,
    /// Why, with the figures.
    pub why: String,
    /// What came of it; null: it is not done yet.
    pub outcome: Option<String>,
}

/// What the pilot saw in one look. A trace has one of these in each line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PilotSight {
    /// Time of the look, in milliseconds since any fixed moment.
    pub at_ms: u64,
    /// The host's memory, and then that of control groups that bound the VMs further.
    pub bounds: Vec<SeenBound>,
    /// In how many thousandths of the time some task of the host waited for memory; null: the
    /// kernel does not tell.
    pub stall_permille: Option<u32>,
    /// What all swap files take.
    #[serde(default)]
    pub swap_bytes: u64,
    /// The VMs.
    pub vms: Vec<SeenVm>,
}

/// A bound of memory, as the pilot saw it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SeenBound {
    /// Whose it is.
    pub name: String,
    /// All of it.
    pub total_bytes: u64,
    /// What is left of it.
    pub available_bytes: u64,
}

/// Memory that a guest has plugged, as the pilot saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SeenPlugged {
    /// What is plugged.
    pub bytes: u64,
    /// What is to be plugged.
    pub asked_bytes: u64,
    /// What was to be plugged before the pilot had the guest unplug any.
    pub full_bytes: u64,
    /// What is plugged or unplugged at a time.
    pub block_bytes: u64,
    /// Whether the guest can be asked to unplug some now.
    pub may_unplug: bool,
}

/// A VM, as the pilot saw it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SeenVm {
    /// The VM's name.
    #[schema(value_type = String)]
    pub name: VmName,
    /// How much its speed matters.
    pub class: VmClass,
    /// Its weight among VMs of its class.
    pub weight: u32,
    /// Resident memory below which nothing in use is taken; null: what its guest needs to live.
    pub min_bytes: Option<u64>,
    /// Most resident memory; null: all of its memory.
    pub max_bytes: Option<u64>,
    /// Whether the pilot leaves it as it is.
    pub hold: bool,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Host memory that it takes.
    pub resident_bytes: u64,
    /// Resident memory without which its guest does not live.
    pub floor_bytes: u64,
    /// The limit that the pilot has given it; null: none.
    pub limit_bytes: Option<u64>,
    /// Free memory of its guest that is resident at least.
    pub spare_bytes: u64,
    /// What it works with; null: not known.
    pub working_bytes: Option<u64>,
    /// Evicted memory that it missed, in all: it came back within 30 s or at its limit.
    pub refaulted_bytes: u64,
    /// Memory that its compressed pages take.
    #[serde(default)]
    pub compressed_bytes: u64,
    /// The most that they may take; null: it can have none.
    #[serde(default)]
    pub compressed_most_bytes: Option<u64>,
    /// The most that they may take without the pilot; 0: the pilot has not changed it.
    #[serde(default)]
    pub compressed_own_bytes: u64,
    /// What its guest's kernel manages, by its own word; null: it said nothing lately.
    #[serde(default)]
    pub guest_total_bytes: Option<u64>,
    /// What its guest could use without running out of memory, by its own word; null: as above.
    #[serde(default)]
    pub guest_available_bytes: Option<u64>,
    /// Memory that its guest has plugged; null: it can unplug none, or that was not known.
    #[serde(default)]
    pub plugged: Option<SeenPlugged>,
    /// Whether its guest waits for room below the limit.
    pub waits: bool,
    /// Whether free memory can be reclaimed from it now.
    pub may_reclaim: bool,
    /// Whether it can have a limit now.
    pub may_limit: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_leaves_something_to_vms() {
        let check = |reserve_percent, reserve_bytes| {
            let request =
                PilotRequest { reserve_percent, reserve_bytes, ..PilotRequest::default() };
            request.check().map_err(|error| error.to_string())
        };
        assert_eq!(check(Some(90), None), Ok(()));
        assert_eq!(check(None, Some(u64::MAX)), Ok(()));
        assert!(check(Some(91), None).unwrap_err().contains("give 90% or less"));
        assert!(check(Some(1), Some(1)).unwrap_err().contains("not both"));
    }

    #[test]
    fn a_stall_is_a_part_of_the_time() {
        let check = |percent| {
            PilotRequest { stall_percent: Some(percent), ..PilotRequest::default() }.check()
        };
        assert!(check(0).is_ok() && check(100).is_ok());
        let why = check(101).unwrap_err().to_string();
        assert_eq!(why, "tasks cannot wait for 101 % of the time: give 0 to 100");
    }

    #[test]
    fn weights_are_bounded() {
        let check = |weight| RuleRequest { weight: Some(weight), ..RuleRequest::default() }.check();
        assert!(check(1).is_ok() && check(10_000).is_ok());
        assert!(check(0).is_err() && check(10_001).is_err());
    }
}
