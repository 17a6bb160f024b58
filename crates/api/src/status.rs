//! The state of a managed VM, as `ebb status --json` prints it.

mod balloon;
mod faults;
mod limit;
mod parts;
mod sharing;
mod size;
mod summary;
mod tier;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use self::balloon::{BalloonStatus, GuestFigures};
pub use self::faults::{FaultCounts, FaultSpread, FaultTimes};
pub use self::limit::LimitStatus;
pub use self::parts::MemoryParts;
pub use self::sharing::{Fragmentation, KindBytes, SharingStatus};
pub use self::size::{MemoryDeviceStatus, SizeStatus};
pub use self::summary::VmSummary;
pub use self::tier::{TierStatus, TierUse};
use crate::{
    Accelerator, Backing, Confinement, MayTake, Mechanism, Mode, ReclaimReport, ReclaimWhen, State,
    VmName,
};

/// The largest buddy order of an x86-64 kernel with its standard configuration.
pub const ORDER_MAX: u8 = 10;

/// Status of one VM. Null means: not known, or there is none.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VmStatus {
    /// The VM's name.
    #[schema(value_type = String)]
    pub name: VmName,
    /// QEMU's process number.
    pub pid: i32,
    /// What Ebb does with the VM.
    pub state: State,
    /// Why the VM is in this state, and what comes next; null for a managed VM that answers.
    #[serde(default)]
    pub state_reason: Option<String>,
    /// Age of all figures, in milliseconds: 0, unless the VM is slow to answer or not managed.
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
    /// How reclaimed memory is watched.
    pub mode: Mode,
    /// Why this mode.
    pub mode_reason: String,
    /// Which memory Ebb may reclaim or evict, and which devices restrict that.
    #[serde(default)]
    pub reach: ReachStatus,
    /// How free memory is found and reclaimed.
    pub mechanism: Mechanism,
    /// Why this mechanism.
    pub mechanism_reason: String,
    /// Path of the UNIX socket of the guest's console; null for a VM that Ebb did not start.
    #[schema(value_type = Option<String>)]
    pub console: Option<PathBuf>,
    /// The log of what the guest printed there; null for a VM that Ebb did not start.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub console_log: Option<PathBuf>,
    /// How QEMU is confined; null for a VM that Ebb did not start.
    #[serde(default)]
    pub confinement: Option<Confinement>,
    /// Smallest buddy block to reclaim, as its order: 9 is 2 MiB.
    pub min_order: u8,
    /// The guest's RAM: what the VM began with, and what is plugged.
    pub memory_bytes: u64,
    /// Memory of devices that QEMU has removed and freed while Ebb managed the VM. It is not part
    /// of `memory_bytes`.
    #[serde(default)]
    pub unplugged_bytes: u64,
    /// The part of `memory_bytes` that takes host memory now.
    pub resident_bytes: u64,
    /// Where all of it is; null: the VM's process is of an earlier release.
    #[serde(default)]
    pub parts: Option<MemoryParts>,
    /// Strict mode: empty memory that Ebb has on record. Release mode keeps no record:
    /// `memory_bytes - resident_bytes`, which includes memory that was never touched.
    pub emptied_bytes: u64,
    /// Free memory by the guest's own count; null unless the guest is trusted.
    pub guest_free_bytes: Option<u64>,
    /// What the guest's own memory tells about the guest.
    pub guest: GuestStatus,
    /// Faults served by the VM's current process.
    pub faults: FaultCounts,
    /// Time from a fault's arrival to its answer.
    pub fault_ns: FaultTimes,
    /// Memory reclaimed since Ebb manages the VM.
    pub reclaimed_total_bytes: u64,
    /// Memory given back to the guest. Strict mode: by the VM's current process. Release mode:
    /// computed from residency, since Ebb manages the VM.
    pub returned_total_bytes: u64,
    /// Automatic reclaim.
    pub auto: AutoStatus,
    /// The limit on resident memory.
    pub limit: LimitStatus,
    /// What the guest may use, and what changes that.
    pub size: SizeStatus,
    /// The VM's balloon; null: it has none.
    pub balloon: Option<BalloonStatus>,
    /// The tiers that hold the VM's memory; null: the VM was started without `--tier`.
    #[serde(default)]
    pub tier: Option<TierStatus>,
    /// What HyperAlloc does, for a guest that shares its page-frame allocator.
    pub sharing: SharingStatus,
    /// What the disks that Ebb serves have done.
    pub disks: DiskCounts,
    /// What the operator should know, one sentence each.
    pub warnings: Vec<String>,
}

/// Which memory of a VM Ebb may reclaim or evict, and what restricts that.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReachStatus {
    /// What Ebb may take.
    pub may_take: MayTake,
    /// Devices, and whatever else accesses the VM's memory, that leave less than everything.
    pub devices: Vec<ReachingDevice>,
    /// State of the last migration, in QEMU's word; null: there was none.
    pub migration: Option<String>,
}

/// A device, or anything else, that accesses a VM's memory by itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReachingDevice {
    /// Its name, as QEMU or the kernel calls it.
    pub name: String,
    /// What Ebb may take despite it.
    pub may_take: MayTake,
    /// Why no more.
    pub why: String,
}

/// What the guest's own memory tells about the guest.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct GuestStatus {
    /// The guest kernel's release, as it names itself.
    pub kernel: Option<String>,
    /// Whether the guest is trusted, so that Ebb may reclaim memory by its page metadata.
    pub trusted: bool,
    /// Whether only what the guest's kernel has registered is known of it.
    #[serde(default)]
    pub registered: bool,
    /// Why the guest is not trusted; null if it is.
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
    /// Whether automatic reclaim is on.
    pub on: bool,
    /// What begins a round.
    #[serde(default)]
    pub when: ReclaimWhen,
    /// Time between two rounds, in milliseconds. With `when` as `pressure`, it counts only while
    /// `ebbd` does not watch the host.
    pub interval_ms: u64,
    /// Available memory of the host below which there is pressure, in percent; null: `below_bytes`
    /// counts.
    #[serde(default)]
    pub below_percent: Option<u32>,
    /// Available memory of the host below which there is pressure; null: `below_percent` counts.
    #[serde(default)]
    pub below_bytes: Option<u64>,
    /// Free memory to leave in the guest. V-Probe leaves 64 MiB if this is less.
    pub keep_bytes: u64,
    /// What the last round did; null before the first.
    pub last: Option<ReclaimReport>,
    /// Why Ebb reclaims nothing now; null: nothing is in the way, or automatic reclaim is off.
    #[serde(default)]
    pub stuck: Option<String>,
    /// Host pressure, as the VM's process knows it; null unless `when` is `pressure`.
    #[serde(default)]
    pub pressure: Option<PressureStatus>,
}

/// Host pressure, as the process of one VM knows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PressureStatus {
    /// By what `ebbd` sees that the host is short of memory; null: `ebbd` does not watch the host,
    /// and the interval counts from 30 s of its silence on.
    pub seen_by: Option<String>,
    /// Rounds that pressure began, counted by the VM's current process.
    pub rounds: u64,
    /// Why the last one began, with the host's figures; null before the first.
    pub why: Option<String>,
    /// Time since it began, in seconds; null before the first.
    pub age_s: Option<u64>,
}

/// What all disks of a VM that Ebb serves have done, since the VM's current process serves them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiskCounts {
    /// Answered requests.
    pub requests: u64,
    /// Requests that were answered with an error.
    pub failed_requests: u64,
    /// Refused accesses to guest memory: outside of RAM, or to a frame that no device may use.
    pub dma_faults: u64,
    /// Read from the images.
    pub read_bytes: u64,
    /// Written to the images.
    pub written_bytes: u64,
}
