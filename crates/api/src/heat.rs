//! Which of a VM's memory is hot.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::HeatTracker;

/// Tell which memory is hot; for that monitor the VM, unless figures are kept.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HeatRequest {
    /// Monitor it anew, whatever is kept.
    #[serde(default)]
    pub fresh: bool,
}

/// How far a monitoring is, and what the last one found.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct HeatReport {
    /// One is under way; its figures come when it ends.
    pub monitoring: bool,
    /// Windows of it that have ended.
    pub windows_done: u8,
    /// Windows of a monitoring.
    pub windows: u8,
    /// Why the last one found nothing; null: it did, or there was none.
    pub failed: Option<String>,
    /// What the last one found that ended well; null: there was none.
    pub figures: Option<HeatFigures>,
}

/// What a monitoring found.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct HeatFigures {
    /// How long ago it ended, in seconds.
    pub age_s: u64,
    /// Windows in which was looked.
    pub windows: u8,
    /// How long these took together, in milliseconds.
    pub duration_ms: u64,
    /// By what the VM was watched.
    pub tracker: HeatTracker,
    /// Why by this.
    pub tracker_reason: String,
    /// What this host needs so that each use is seen.
    pub host_needs: String,
    /// What a window in which a page was read counts for in its degree.
    pub read_weight: u32,
    /// The same for one in which it was written.
    pub write_weight: u32,
    /// The most that a degree can be.
    pub degree_max: u64,
    /// The memory looked at: all that the VM can have.
    pub memory_bytes: u64,
    /// Pages that were used in any window.
    pub used_bytes: u64,
    /// The hot set: the hotter 80 % of the pages with a degree of 3 or more.
    pub hot_bytes: u64,
    /// Time that the worker took for looking, in microseconds.
    pub looking_us: u64,
    /// Page tables of the guest that were read for that.
    pub tables_read: u64,
    /// Page tables that were not read, since nobody had used them.
    pub tables_pruned: u64,
    /// Marks of a use that were cleared.
    pub marks_cleared: u64,
    /// The guest has more page tables than were looked at.
    pub is_truncated: bool,
    /// How much memory has which degree, coldest first; what was not used is left out.
    pub degrees: Vec<DegreeBytes>,
    /// The memory is told of in blocks of this size.
    pub block_bytes: u64,
    /// Ranges of guest-physical memory, in order.
    pub regions: Vec<HeatRegion>,
}

/// Memory of one degree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct DegreeBytes {
    /// The page-degree: windows with reads and with writes, each weighted.
    pub degree: u64,
    /// How much has it.
    pub bytes: u64,
}

/// A range of guest-physical memory.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct HeatRegion {
    /// Where it begins.
    pub start: u64,
    /// Its blocks, in order.
    pub blocks: Vec<HeatBlock>,
}

/// A block of it.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct HeatBlock {
    /// The mean degree of its pages, those not used among them.
    pub degree: f64,
    /// Pages that were used.
    pub used_bytes: u64,
    /// Pages of the hot set.
    pub hot_bytes: u64,
}
