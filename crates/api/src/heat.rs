//! Which of a VM's memory is hot.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::HeatTracker;

/// Report which memory is hot. Ebb monitors the VM for it, unless figures are known.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HeatRequest {
    /// Monitor the VM again, even if figures are known.
    #[serde(default)]
    pub fresh: bool,
}

/// Progress of a monitoring, and the figures of the last one.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct HeatReport {
    /// A monitoring is under way; its figures come when it ends.
    pub monitoring: bool,
    /// Windows of the monitoring under way that have ended.
    pub windows_done: u8,
    /// Windows of a monitoring.
    pub windows: u8,
    /// Why the last monitoring failed; null: it succeeded, or there was none.
    pub failed: Option<String>,
    /// Figures of the last monitoring that succeeded; null: there was none.
    pub figures: Option<HeatFigures>,
}

/// What a monitoring found.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct HeatFigures {
    /// Seconds since it ended.
    pub age_s: u64,
    /// Windows in which page uses were counted.
    pub windows: u8,
    /// Duration of all windows together, in milliseconds.
    pub duration_ms: u64,
    /// How Ebb saw the uses.
    pub tracker: HeatTracker,
    /// Why this tracker.
    pub tracker_reason: String,
    /// What this tracker needs of the host, and which uses it misses.
    pub host_needs: String,
    /// Weight of a window in which a page was read.
    pub read_weight: u32,
    /// Weight of a window in which a page was written.
    pub write_weight: u32,
    /// The highest possible degree.
    pub degree_max: u64,
    /// The monitored memory: all that the VM can have.
    pub memory_bytes: u64,
    /// Pages that were used in any window.
    pub used_bytes: u64,
    /// The hot set: the hottest 80 % of the pages of degree 3 or more.
    pub hot_bytes: u64,
    /// Time that the worker spent on the monitoring, in microseconds.
    pub looking_us: u64,
    /// Page tables of the guest that were read.
    pub tables_read: u64,
    /// Page tables that were not read, because they had not been used.
    pub tables_pruned: u64,
    /// Marks of use that were cleared.
    pub marks_cleared: u64,
    /// The guest has more page tables than were read.
    pub is_truncated: bool,
    /// Memory by degree, coldest first; unused memory is left out.
    pub degrees: Vec<DegreeBytes>,
    /// Size of a block of `regions`.
    pub block_bytes: u64,
    /// The heat map: ranges of guest-physical memory, in order.
    pub regions: Vec<HeatRegion>,
}

/// Memory of one degree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct DegreeBytes {
    /// The degree: windows with reads and with writes, each weighted.
    pub degree: u64,
    /// Memory of this degree.
    pub bytes: u64,
}

/// A range of guest-physical memory.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct HeatRegion {
    /// First guest-physical address.
    pub start: u64,
    /// Its blocks, in order.
    pub blocks: Vec<HeatBlock>,
}

/// A block of a region.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct HeatBlock {
    /// Mean degree of the block's pages, unused ones included.
    pub degree: f64,
    /// Memory of the block that was used.
    pub used_bytes: u64,
    /// Memory of the block in the hot set.
    pub hot_bytes: u64,
}
