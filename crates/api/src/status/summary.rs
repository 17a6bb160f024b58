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
    /// QEMU's process.
    pub pid: i32,
    /// What Ebb does with it.
    pub state: State,
    /// Why this state, and what comes next; null for one that is held and answers.
    #[serde(default)]
    pub state_reason: Option<String>,
    /// How old these figures are, in milliseconds; null: this daemon has none yet, and those
    /// that are not on record are 0.
    #[serde(default)]
    pub age_ms: Option<u64>,
    /// What runs the guest's instructions.
    pub accelerator: Accelerator,
    /// What the guest's RAM is made of; never `auto`.
    pub backing: Backing,
    /// How emptied memory is watched.
    pub mode: Mode,
    /// Whether free memory may be taken on the strength of the guest's page metadata.
    pub trusted: bool,
    /// Whether automatic reclaim runs.
    pub auto: bool,
    /// The guest's RAM as QEMU gives it.
    pub memory_bytes: u64,
    /// The part of it that takes host memory now.
    pub resident_bytes: u64,
    /// The limit on resident memory; null: no limit.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Content that is kept outside of resident memory: in the store, or by a disk's blocks.
    #[serde(default)]
    pub evicted_bytes: u64,
}
