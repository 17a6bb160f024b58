//! What is on record of a VM, and how the daemon refuses.

pub mod api_error;
pub mod auto;
pub mod fault_spread;
pub mod figures;
pub mod host_pressure;
pub mod member;
pub mod monitoring;
pub mod piloted;
pub mod record;
pub mod served;
pub mod share;
pub mod site;
pub mod summary;
pub mod swap_rule;
pub mod task;
pub mod tiers;
pub mod times;
pub mod vm_routes;
pub mod work;

/// Largest size of memory, in bytes.
const BYTES_MAX: u64 = 1 << 52;
