//! All VMs of the daemon.

pub mod asking;
pub mod pool;
pub mod pool_keeper;
pub mod recovery;
pub mod registry;
pub mod run;
mod start_qemu;
mod supervisor;
pub mod swap_dir;
mod tiers;
