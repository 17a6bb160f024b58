//! A line of the list of VMs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Accelerator, Backing, Mode, State, VmName};

/// One line of the list of VMs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VmSummary {
    /// The VM's name.
    #[schema(value_type = String)]
    pub name: VmName,
    /// QEMU's process number.
    pub pid: i32,
    /// What Ebb does with the VM.
    pub state: State,
    /// Why the VM is in this state, and what comes next, or why its guest waits for room; null for a
    /// managed VM that answers and does not wait.
    #[serde(default)]
    pub state_reason: Option<String>,
    /// Age of these figures, in milliseconds; null: there are none yet, and figures that are not on
    /// record are 0.
    #[serde(default)]
    pub age_ms: Option<u64>,
    /// What runs the guest's instructions.
    pub accelerator: Accelerator,
    /// What the guest's RAM is made of; never `auto`.
    pub backing: Backing,
    /// How reclaimed memory is watched.
    pub mode: Mode,
    /// Whether the guest is trusted, so that Ebb may reclaim memory by its page metadata.
    pub trusted: bool,
    /// Whether automatic reclaim is on.
    pub auto: bool,
    /// The guest's RAM as QEMU gives it.
    pub memory_bytes: u64,
    /// The part of `memory_bytes` that takes host memory now.
    pub resident_bytes: u64,
    /// The limit on resident memory; null: no limit.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Evicted memory: its content is in the store, or in equal blocks of the guest's disks.
    #[serde(default)]
    pub evicted_bytes: u64,
}
