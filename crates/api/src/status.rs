//! The state of a held VM, as `ebb status --json` prints it.

mod balloon;
mod faults;
mod limit;
mod sharing;
mod size;
mod summary;
mod tier;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use self::balloon::{BalloonStatus, GuestFigures};
pub use self::faults::{FaultCounts, FaultTimes};
pub use self::limit::LimitStatus;
pub use self::sharing::{Fragmentation, KindBytes, SharingStatus};
pub use self::size::{MemoryDeviceStatus, SizeStatus};
pub use self::summary::VmSummary;
pub use self::tier::{TierStatus, TierUse};
use crate::{
    Accelerator, Backing, Confinement, MayTake, Mechanism, Mode, ReclaimReport, State, VmName,
};

/// The largest buddy order of an x86-64 kernel with its standard configuration.
pub const ORDER_MAX: u8 = 10;

/// Everything known about one VM. Null stands where something is not known.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VmStatus {
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
    /// How old all these figures are, in milliseconds: 0 unless the VM is slow to answer, or not
    /// held.
    #[serde(default)]
    pub age_ms: u64,
    /// What runs the guest's instructions.
    pub accelerator: Accelerator,
    /// Why this accelerator.
    pub accelerator_reason: String,
    /// What the guest's RAM is made of; never `auto`.
    pub backing: Backing,
    /// Why this backing.
    pub backing_reason: String,
    /// How emptied memory is watched.
    pub mode: Mode,
    /// Why this mode.
    pub mode_reason: String,
    /// What of its memory may be taken, by what reaches it beside QEMU.
    #[serde(default)]
    pub reach: ReachStatus,
    /// How its free memory is found and taken.
    pub mechanism: Mechanism,
    /// Why this mechanism.
    pub mechanism_reason: String,
    /// The guest's console: a UNIX socket or a log file; null for a VM that Ebb did not start.
    #[schema(value_type = Option<String>)]
    pub console: Option<PathBuf>,
    /// The log of what the guest printed there; null for a VM that Ebb did not start.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub console_log: Option<PathBuf>,
    /// What its QEMU is and may do; null for a VM that Ebb did not start.
    #[serde(default)]
    pub confinement: Option<Confinement>,
    /// Smallest buddy block to take: 9 is 2 MiB.
    pub min_order: u8,
    /// The guest's RAM as QEMU gives it: what it began with, and what is plugged.
    pub memory_bytes: u64,
    /// What it had when Ebb took hold of it, and QEMU has unplugged since: let go of.
    #[serde(default)]
    pub unplugged_bytes: u64,
    /// The part of it that takes host memory now.
    pub resident_bytes: u64,
    /// The part of it that takes none and reads as zero. In strict mode what Ebb emptied and the
    /// guest has not taken back; in release mode `memory_bytes - resident_bytes`, what was never
    /// touched included.
    pub emptied_bytes: u64,
    /// Free in the guest's own view; null without a trusted inspection.
    pub guest_free_bytes: Option<u64>,
    /// What the guest's own memory tells about it.
    pub guest: GuestStatus,
    /// Faults served since Ebb holds the VM.
    pub faults: FaultCounts,
    /// Time from a fault's arrival to its answer.
    pub fault_ns: FaultTimes,
    /// Emptied since Ebb holds the VM.
    pub reclaimed_total_bytes: u64,
    /// Given back since Ebb holds the VM. In strict mode what Ebb restored; in release mode, which
    /// keeps no record, computed from residency.
    pub returned_total_bytes: u64,
    /// Automatic reclaim.
    pub auto: AutoStatus,
    /// The limit on resident memory.
    pub limit: LimitStatus,
    /// What the guest may have of it, and what that can be.
    pub size: SizeStatus,
    /// Its balloon; null: it has none.
    pub balloon: Option<BalloonStatus>,
    /// The tiers that hold its memory; null: it was started without.
    #[serde(default)]
    pub tier: Option<TierStatus>,
    /// What is done by the allocator that the guest shares.
    pub sharing: SharingStatus,
    /// What its disks that Ebb serves have done.
    pub disks: DiskCounts,
    /// What the operator should know, one sentence each.
    pub warnings: Vec<String>,
}

/// What of a VM's memory may be taken, and what is in the way of more.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReachStatus {
    /// What may be taken.
    pub may_take: MayTake,
    /// Devices, and what else reaches its memory, that leave less than everything.
    pub devices: Vec<ReachingDevice>,
    /// How far its last migration is, in QEMU's word; null: there was none.
    pub migration: Option<String>,
}

/// What reaches a VM's memory by itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReachingDevice {
    /// As QEMU or the kernel calls it.
    pub name: String,
    /// What may be taken beside it.
    pub may_take: MayTake,
    /// Why no more.
    pub why: String,
}

/// What the guest's own memory tells about it.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct GuestStatus {
    /// The guest kernel's release, as it names itself.
    pub kernel: Option<String>,
    /// Whether free memory may be taken on the strength of its page metadata.
    pub trusted: bool,
    /// Why not, when it is not trusted.
    pub why: Option<String>,
    /// Free buddy blocks by order, 0 to 10.
    #[schema(value_type = Option<Vec<u64>>, min_items = 11, max_items = 11)]
    pub free_blocks: Option<[u64; ORDER_MAX as usize + 1]>,
    /// Anonymous memory of its processes.
    pub anonymous_bytes: Option<u64>,
    /// Page cache.
    pub file_bytes: Option<u64>,
    /// Kernel objects.
    pub slab_bytes: Option<u64>,
    /// Page tables of its processes.
    pub page_table_bytes: Option<u64>,
    /// Memory that the guest has taken out of its own use.
    pub offline_bytes: Option<u64>,
}

/// Automatic reclaim of one VM.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct AutoStatus {
    /// Whether it runs.
    pub on: bool,
    /// Time between two reclaims, in milliseconds.
    pub interval_ms: u64,
    /// Free memory that it leaves in the guest, besides the reserve.
    pub keep_bytes: u64,
    /// What its last round did; null before the first.
    pub last: Option<ReclaimReport>,
    /// Why it reclaims nothing now; null: nothing is in the way, or it is off.
    #[serde(default)]
    pub stuck: Option<String>,
}

/// What the disks that Ebb serves have done since this daemon serves them, all together.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiskCounts {
    /// Requests answered.
    pub requests: u64,
    /// Of these, those that were answered with an error.
    pub failed_requests: u64,
    /// Accesses to the guest's memory that were refused: no device may use a frame there.
    pub dma_faults: u64,
    /// Read from the images.
    pub read_bytes: u64,
    /// Written to the images.
    pub written_bytes: u64,
}
