//! A VM's limit, and what is evicted because of it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
