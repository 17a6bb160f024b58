//! A VM's limit, and what is evicted because of it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The limit on a VM's resident memory, and what was evicted because of it. Totals are counted by
/// the VM's current process.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct LimitStatus {
    /// The limit on resident memory; null: no limit.
    pub bytes: Option<u64>,
    /// The VM's share of the pool, which then sets the limit; null: the VM is not in the pool.
    #[serde(default)]
    pub share_bytes: Option<u64>,
    /// High mark: above it, the guest's faults wait a little for eviction; null: no limit.
    pub high_bytes: Option<u64>,
    /// Low mark: eviction goes down to it; null: no limit.
    pub low_bytes: Option<u64>,
    /// Evicted content in the store now: in the swap file, or in compressed memory.
    pub saved_bytes: u64,
    /// Disk-backed memory now.
    pub on_disk_bytes: u64,
    /// Refilled memory that keeps its slots in the swap file: if it is unchanged, it is evicted
    /// again without a write.
    pub clean_bytes: u64,
    /// Evicted and saved.
    pub saved_total_bytes: u64,
    /// Evicted without a write, because the slot still held the same content.
    pub clean_total_bytes: u64,
    /// Evicted without a write, because a disk block holds the same content (silent writes
    /// avoided).
    pub on_disk_total_bytes: u64,
    /// Evicted without a write, because the guest had freed the frame, or it had the same byte
    /// everywhere. It comes back without a read.
    pub empty_total_bytes: u64,
    /// Read back because of a touch.
    pub refilled_total_bytes: u64,
    /// What was touched and read back, with what was read ahead of it and used, less than 30 s after
    /// its eviction.
    #[serde(default)]
    pub refaulted_total_bytes: u64,
    /// Read back with those, ahead of a touch.
    pub ahead_total_bytes: u64,
    /// The part of `ahead_total_bytes` that was used.
    pub ahead_hit_total_bytes: u64,
    /// Touched and not read back, because the guest has freed the frame since its eviction (false
    /// reads avoided).
    pub false_reads_avoided_total_bytes: u64,
    /// Read back although the guest seems to have freed the frame since: its use at the eviction is
    /// not known (false reads that remain).
    pub false_reads_total_bytes: u64,
    /// Evicted content that was dropped before any touch, because the guest has freed the frame
    /// since its eviction.
    pub dropped_total_bytes: u64,
    /// Old content that a disk request overwrote before it was read back (stale reads avoided).
    pub replaced_total_bytes: u64,
    /// Blocks of the guest's disks whose content Ebb knows now.
    pub tracked_blocks: u64,
    /// Pages of `saved_bytes` in compressed memory now.
    pub compressed_pages: u64,
    /// Memory that the compressed pages take, free parts of chunks included; it counts against the
    /// limit.
    pub compressed_bytes: u64,
    /// The most that compressed pages may take.
    pub compressed_limit_bytes: u64,
    /// Size of the compressed pages, divided by the memory that they take; null: there are none.
    pub compressed_ratio: Option<f64>,
    /// Moved from compressed memory to the swap file.
    pub written_back_total_bytes: u64,
    /// Disk space of the VM's swap file, at the last look.
    #[serde(default)]
    pub swap_file_bytes: u64,
    /// Disk space of the swap files of all VMs, at the last look.
    #[serde(default)]
    pub all_swap_files_bytes: u64,
    /// The swap file is full, and the guest waits if it needs more memory: until there is room, or
    /// the limit is raised.
    #[serde(default)]
    pub waits: bool,
    /// Touches that wait for this reason now.
    #[serde(default)]
    pub waiting_touches: u64,
    /// Why the limit is exceeded, or why the guest waits for evicted content, and what to do; null:
    /// nothing is in the way.
    pub stuck: Option<String>,
}
