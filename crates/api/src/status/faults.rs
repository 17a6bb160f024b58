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

/// How long the faults of a while took, from a fault's arrival to its answer.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct FaultSpread {
    /// How many took less than 1024 ns, how many of the others less than 4 times that, then less
    /// than 16 times that, and so on. The 14th number has no upper bound. Zeros at the end are left
    /// out.
    pub counts: Vec<u64>,
    /// The median, in nanoseconds, right to a factor of 4; null: there was no fault.
    pub p50: Option<u64>,
    /// 99 of 100 faults are within this many nanoseconds, right to a factor of 4.
    pub p99: Option<u64>,
}
