//! Which frames of a guest to reclaim or evict, and reclaiming them: journey 1.
#![forbid(unsafe_code)]

mod choice;
pub mod cost;
pub mod hand;
pub mod hyperalloc;
pub mod limit;
pub mod resting;
pub mod uses;
pub mod vprobe;
