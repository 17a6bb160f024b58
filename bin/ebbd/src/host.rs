//! All VMs of the daemon, each with a process of its own.

pub mod apart;
pub mod asking;
pub mod events;
mod fault_window;
pub mod guests;
pub mod history;
pub mod host_vms;
pub mod jobs;
mod kept;
pub mod lasting;
mod link;
mod listing;
pub mod metrics;
pub mod pilot;
pub mod pool;
pub mod pool_keeper;
pub mod pressure_watch;
mod rates;
pub mod recovery;
pub mod registry;
mod saved;
pub mod start_vm;
mod supervisor;
pub mod swap_dir;
#[cfg(test)]
pub mod testing;
pub mod top;
mod vm_process;
