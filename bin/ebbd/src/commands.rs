//! Subcommands that serve one device.

pub mod disk;
pub mod memory;
