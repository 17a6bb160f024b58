//! The host: what it offers, and what Ebb sets on it for VMs.

pub mod calibration;
pub mod cgroup;
pub mod confine;
pub mod denied_args;
pub mod host_facts;
pub mod host_memory;
pub mod last_words;
pub mod origin;
pub mod process_lock;
pub mod remains;
pub mod small_pages;
pub mod starting;
