//! How fast a host's tiers are.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Speed of the host's tiers, and the weights of reads and writes that follow from it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Calibration {
    /// Memory, then NUMA nodes in order of number, then tiers that are reached by a fault.
    pub tiers: Vec<TierSpeed>,
    /// Weight of a window in which a page was read.
    pub read_weight: u32,
    /// Weight of a window in which a page was written.
    pub write_weight: u32,
}

/// How fast a tier is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TierSpeed {
    /// The tier, as `--tier` names it.
    pub tier: String,
    /// Time to read a page there, in nanoseconds: the median.
    pub read_ns: u64,
    /// Time to write a page there, in nanoseconds: the median. Compressed memory and files are
    /// written in batches.
    pub write_ns: u64,
}
