//! System calls and ioctls, each behind a small safe type. This is the only product crate that
//! contains `unsafe`.
//!
//! No code here knows what a guest is. [`ebb_units`] has the address types.
#![deny(missing_docs)]

pub mod bus_guard;
pub mod byte_locks;
pub mod call_filter;
pub mod confine;
pub mod folios;
pub mod guest_mapping;
pub mod heap;
pub mod inject;
pub mod kexec;
pub mod khugepaged;
pub mod kvm;
pub mod kvm_vm;
pub mod mapping;
pub mod meminfo;
pub mod memory_fs;
pub mod numa;
pub mod page_idle;
pub mod pagemap;
pub mod panics;
pub mod private_dir;
pub mod private_file;
pub mod process;
mod process_stat;
pub mod psi;
pub mod ram_file;
pub mod remote_ring;
pub mod scratch;
pub mod session;
pub mod transfer;
pub mod uffd;
pub mod uffd_node;
pub mod uring;
pub mod user_namespace;
pub mod vfio;
