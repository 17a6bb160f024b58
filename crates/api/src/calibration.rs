//! How fast a host's tiers are.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What was measured, and what windows with reads and with writes count for by that.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Calibration {
    /// The tiers at hand: memory, NUMA nodes in order of number, then what is reached by fault.
    pub tiers: Vec<TierSpeed>,
    /// What a window in which a page was read counts for in its degree.
    pub read_weight: u32,
    /// The same for one in which it was written.
    pub write_weight: u32,
}

/// How fast a tier is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TierSpeed {
    /// The tier, as ladders name it.
    pub tier: String,
    /// To read a page there, in nanoseconds: the median.
    pub read_ns: u64,
    /// To write one, as it is written there: in batches where that is so.
    pub write_ns: u64,
}
