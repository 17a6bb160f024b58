//! Devices that use the memory.

pub mod access;
pub mod pluggable;
