//! All VMs of a host at one moment: what `ebb top` shows.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{FaultSpread, MemoryParts, PilotMode, PilotStage, SeenBound, State, VmClass, VmName};

/// The host and its VMs at one moment, by what the VMs' processes published last. No VM is asked.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Top {
    /// The moment, in milliseconds since 1970 (UTC).
    pub at_unix_ms: u64,
    /// The host.
    pub host: TopHost,
    /// The VMs, by name.
    pub vms: Vec<TopVm>,
}

/// The host's memory, and what the pilot does with it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TopHost {
    /// All memory of the host.
    pub total_bytes: u64,
    /// What is left of it.
    pub available_bytes: u64,
    /// Memory that is to stay available, by the pilot's settings.
    pub reserve_bytes: u64,
    /// Control groups that bound the VMs further.
    #[serde(default)]
    pub bounds: Vec<SeenBound>,
    /// In how many thousandths of the last 10 s some task of the host waited for memory (PSI);
    /// null: the kernel does not tell.
    pub stall_permille: Option<u32>,
    /// What the pilot does.
    pub pilot: PilotMode,
    /// How short of memory the host is; null: the pilot is off, or has not looked yet.
    pub stage: Option<PilotStage>,
}

/// A VM: where its memory is, and whether it misses some.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TopVm {
    /// The VM's name.
    #[schema(value_type = String)]
    pub name: VmName,
    /// What Ebb does with the VM.
    pub state: State,
    /// Why the VM is in this state, and what comes next, or why its guest waits for room; null for a
    /// managed VM that answers and does not wait.
    pub state_reason: Option<String>,
    /// Age of these figures, in milliseconds; null: there are none yet.
    pub age_ms: Option<u64>,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Where it is, in parts that add up to `memory_bytes`; null: not known, because there are no
    /// figures yet, or the VM's process is of an earlier release.
    pub parts: Option<MemoryParts>,
    /// Memory that the compressed part takes. It counts against the limit.
    pub compressed_in_bytes: u64,
    /// The limit on what it takes: resident memory and `compressed_in_bytes`; null: none.
    pub limit_bytes: Option<u64>,
    /// Whether the pilot has set this limit.
    pub limit_by_pilot: bool,
    /// What it works with; null: not known.
    pub working_bytes: Option<u64>,
    /// Faults that Ebb served in a second; null: not known.
    pub faults_per_s: Option<u64>,
    /// Time that the faults of the last seconds took; null: not known. A fault may be among those
    /// of two moments.
    pub fault_ns: Option<FaultSpread>,
    /// Evicted memory that came back in a second, and less than 30 s after its eviction; null: not
    /// known.
    pub refaulted_bytes_per_s: Option<u64>,
    /// Whether so much came back that its limit is too low for a VM of its class.
    pub misses_memory: bool,
    /// Whether the guest waits for room in the swap file if it needs more memory.
    pub waits: bool,
    /// Touches that wait for this reason now.
    pub waiting_touches: u64,
    /// How much its speed matters to the pilot.
    pub class: VmClass,
    /// Whether the pilot leaves it as it is.
    pub hold: bool,
    /// Number of warnings that `ebb status` shows.
    pub warnings: u64,
}
