//! What the other modules stand on.

pub mod counters;
pub mod latency;
pub mod sparse;
