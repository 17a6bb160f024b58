//! Faults of a VM: how many, and how long they take.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Faults served, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct FaultCounts {
    /// Touches of frames without memory.
    pub missing: u64,
    /// Writes to protected frames: page metadata, and with a limit also frames that are being
    /// evicted.
    pub metadata: u64,
    /// Reclaimed blocks that came back by a metadata write, and that the guest then did not use.
    pub spurious: u64,
    /// Touches of empty frames before any write to their page metadata; a part of `missing`.
    pub early: u64,
}

/// Quantiles of the time from a fault's arrival to its answer; null before the first fault.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct FaultTimes {
    /// The median, in nanoseconds.
    pub p50: Option<u64>,
    /// 99 of 100 faults are within this many nanoseconds.
    pub p99: Option<u64>,
}
