//! The state of a held VM, as `ebb status --json` prints it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Accelerator, Backing, Confinement, DeviceServer, DriverState, MayTake, Mechanism, Mode,
    OnViolation, ReclaimReport, SizeMechanism, SizeState, State, VmName,
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

/// Faults served, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct FaultCounts {
    /// Touches of memory that was not there.
    pub missing: u64,
    /// Writes to protected page metadata.
    pub metadata: u64,
    /// Those of `metadata` that turned out not to need the memory.
    pub spurious: u64,
    /// Touches of emptied memory that came before any write to its metadata.
    pub early: u64,
}

/// Quantiles of the time from a fault's arrival to its answer; null before the first fault.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct FaultTimes {
    /// The median, in nanoseconds.
    pub p50: Option<u64>,
    /// 99 of 100 are within this many nanoseconds.
    pub p99: Option<u64>,
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

/// The limit on a VM's resident memory, and what lies elsewhere because of it.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct LimitStatus {
    /// What resident memory is held at; null: no limit.
    pub bytes: Option<u64>,
    /// The VM's share of the pool, which then says what the limit is; null: it is not in it.
    #[serde(default)]
    pub share_bytes: Option<u64>,
    /// Above this the guest's faults wait a little for eviction; null: no limit.
    pub high_bytes: Option<u64>,
    /// What is resident above this is evicted in the background; null: no limit.
    pub low_bytes: Option<u64>,
    /// Content in the swap store now.
    pub saved_bytes: u64,
    /// Content that rests on equal blocks of the guest's disks now.
    pub on_disk_bytes: u64,
    /// In memory, while the swap store still holds what it was when it came back: it need not be saved again if it is not changed.
    pub clean_bytes: u64,
    /// Saved since the daemon holds the VM.
    pub saved_total_bytes: u64,
    /// Evicted without a write because the swap store still held the same.
    pub clean_total_bytes: u64,
    /// Evicted without a write because a disk block equals it (silent writes avoided).
    pub on_disk_total_bytes: u64,
    /// Evicted without a write because the guest had freed it, or it was one byte again and again:
    /// it comes back without a read.
    pub empty_total_bytes: u64,
    /// Read back because it was touched.
    pub refilled_total_bytes: u64,
    /// Read back with that, because it lay behind it.
    pub ahead_total_bytes: u64,
    /// Of that, what was used.
    pub ahead_hit_total_bytes: u64,
    /// Touched and not read back, because the guest has freed it since it was evicted (false reads
    /// avoided).
    pub false_reads_avoided_total_bytes: u64,
    /// Of what was read back: what the guest seems to have freed since, too, but what it was used
    /// for when it was evicted is not known (false reads that remain).
    pub false_reads_total_bytes: u64,
    /// Dropped from the store, or no longer resting on a disk, before any touch, because the guest
    /// has freed it since it was evicted.
    pub dropped_total_bytes: u64,
    /// Old content that a device overwrote before it was read back (stale reads avoided).
    pub replaced_total_bytes: u64,
    /// Blocks of the guest's disks that are known by content now.
    pub tracked_blocks: u64,
    /// Pages of the saved content that are compressed in memory now.
    pub compressed_pages: u64,
    /// What they take, room for more included: it counts as a part of the limit.
    pub compressed_bytes: u64,
    /// The most that they may take.
    pub compressed_limit_bytes: u64,
    /// How many times smaller they are, by what they take; null: there are none.
    pub compressed_ratio: Option<f64>,
    /// Moved from there to the swap file since the daemon holds the VM.
    pub written_back_total_bytes: u64,
    /// What its swap file takes on its disk, when last looked at.
    #[serde(default)]
    pub swap_file_bytes: u64,
    /// What the swap files of all VMs take.
    #[serde(default)]
    pub all_swap_files_bytes: u64,
    /// The swap file can take no more, and the guest waits where it needs more memory: until there
    /// is room, or the limit is higher.
    #[serde(default)]
    pub waits: bool,
    /// Touches that wait so now.
    #[serde(default)]
    pub waiting_touches: u64,
    /// Why more is resident than the limit, or the guest waits for what was evicted, and what to
    /// do; null: nothing is in the way.
    pub stuck: Option<String>,
}

/// The size of a VM: what its guest may have.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SizeStatus {
    /// The size: `initial_bytes + plugged_bytes - ballooned_bytes - hard_bytes`.
    pub bytes: u64,
    /// What it began with.
    pub initial_bytes: u64,
    /// Plugged beyond that.
    pub plugged_bytes: u64,
    /// In the balloon.
    pub ballooned_bytes: u64,
    /// Taken in the allocator that it shares, until returned.
    pub hard_bytes: u64,
    /// The largest size that it can have.
    pub max_bytes: u64,
    /// The size that it is to have, on `wanted_node` if that is not null; null: no other.
    pub wanted_bytes: Option<u64>,
    /// The NUMA node that is about.
    pub wanted_node: Option<u32>,
    /// By what its size changes; null: it is not to.
    pub mechanism: Option<SizeMechanism>,
    /// Why by this.
    pub reason: Option<String>,
    /// How far it is.
    pub state: SizeState,
    /// Why it goes no further, in words; null: nothing is in the way.
    pub stopped_by: Option<String>,
    /// Memory that can be plugged, by device.
    pub devices: Vec<MemoryDeviceStatus>,
}

/// A virtio-mem device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct MemoryDeviceStatus {
    /// The guest's NUMA node that its memory is of.
    pub node: u32,
    /// Plugged.
    pub plugged_bytes: u64,
    /// What the guest is asked to plug.
    pub requested_bytes: u64,
    /// The most that can be.
    pub max_bytes: u64,
    /// It is plugged in pieces of this size.
    pub block_bytes: u64,
    /// Whether the guest drives it.
    pub driver: DriverState,
    /// Who serves it.
    pub served_by: DeviceServer,
    /// Touches of what is not plugged; none: QEMU does not tell.
    pub violations: Option<u64>,
}

/// A balloon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct BalloonStatus {
    /// What it holds.
    pub ballooned_bytes: u64,
    /// Whether the guest drives it.
    pub driver: DriverState,
    /// The guest takes memory out of it before it kills a process.
    pub deflates_on_oom: bool,
    /// How often it was emptied at once because the guest was about to run out of memory, since
    /// this daemon holds the VM.
    pub releases: u64,
    /// QEMU takes free pages by itself where the guest tells of them (free page reporting).
    pub reporting_offered: bool,
    /// The guest does; null: not known.
    pub reporting: Option<bool>,
    /// What the guest told of its memory by it; null: it did not.
    pub figures: Option<GuestFigures>,
}

/// What a guest tells of its memory through its balloon; null: not this.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct GuestFigures {
    /// How long ago, in seconds.
    pub age_s: u64,
    /// What its kernel manages, the balloon not included.
    pub total_bytes: Option<u64>,
    /// Free.
    pub free_bytes: Option<u64>,
    /// What it could use without going out of memory.
    pub available_bytes: Option<u64>,
    /// Its page cache.
    pub cache_bytes: Option<u64>,
    /// Read from its own swap space since it booted.
    pub swapped_in_bytes: Option<u64>,
    /// Written there since it booted.
    pub swapped_out_bytes: Option<u64>,
    /// Its faults that waited for a disk since it booted.
    pub major_faults: Option<u64>,
    /// Its other faults since it booted.
    pub minor_faults: Option<u64>,
}

/// The tiers that hold a VM's memory, and whether the fast one is large enough.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct TierStatus {
    /// All of them, fastest first.
    pub ladder: String,
    /// What the first holds.
    pub fast_bytes: u64,
    /// What the VM works with: used since its part of memory was last looked at, or in the turn
    /// before, also where it has left the first since. Each part is looked at as the limit's hand
    /// comes around, every 2.5 to 32 s while much has to go, and less often else; null: not all of
    /// memory was looked at yet, as too little had to leave it. More than half of `fast_bytes` is too
    /// much.
    pub active_bytes: Option<u64>,
    /// Its hot set, as the last monitoring found it, wherever it is; null: there was none lately.
    /// More than half of `fast_bytes` is too much, too.
    #[serde(default)]
    pub hot_bytes: Option<u64>,
    /// What each tier holds, fastest first: now, but nodes when pages were placed last.
    #[serde(default)]
    pub tiers: Vec<TierUse>,
    /// Moved between NUMA nodes by this daemon; null: its tiers are none.
    #[serde(default)]
    pub moved_bytes: Option<u64>,
}

/// What a tier holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TierUse {
    /// The tier, as its ladder names it.
    pub tier: String,
    /// What it may hold; of compressed memory what it may take.
    pub bytes: u64,
    /// Of the guest's memory it holds so much.
    pub held_bytes: u64,
}

/// What is done by the allocator that a guest shares; of others all is null or 0.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SharingStatus {
    /// What the guest is to have, by its allocator, of its memory; null: all of it.
    pub size_bytes: Option<u64>,
    /// Taken from it until it is returned.
    pub hard_bytes: u64,
    /// Taken from it until it touches it.
    pub soft_bytes: u64,
    /// How often it did: huge frames that came back so, since the daemon shares its allocator.
    pub installs: u64,
    /// Time from when such a huge frame was held to when it had memory.
    pub install_ns: FaultTimes,
    /// Touches of what the guest is not to have.
    pub violations: u64,
    /// What happens then.
    pub on_violation: OnViolation,
    /// Why the VM was stopped; null: it was not.
    pub stopped: Option<String>,
    /// How the guest keeps its frames together; null where that cannot be seen.
    pub fragmentation: Option<Fragmentation>,
}

/// Memory in use by the guest's allocator, by what it was taken for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct Fragmentation {
    /// The kernel's own, which stays where it is.
    pub unmovable: KindBytes,
    /// Memory of processes, page cache.
    pub movable: KindBytes,
    /// Blocks of 2 MiB and more.
    pub huge: KindBytes,
}

/// Memory in use of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct KindBytes {
    /// In huge frames of which any part is in use.
    pub huge_bytes: u64,
    /// In use.
    pub used_bytes: u64,
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
