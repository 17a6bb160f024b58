//! Faults of a VM: how many, and how long they take.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
