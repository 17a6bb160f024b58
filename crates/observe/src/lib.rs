//! What the memory of a VM is used for, seen from outside without touching the VM.
//!
//! ```text
//! ram       the memory of the process that is the guest's RAM, page by page
//! layout    where that memory is in the guest
//! view      the guest's RAM for `ebb_inspect`, read once for each look
//! watch     one VM: its kernel, and what it uses
//! watches   all VMs of a host
//! discover  every QEMU on a host, and whether Ebb can manage it
//! ```
//!
//! Nothing is asked of the VMM: no monitor, no userfaultfd, no injected call. It works for any
//! QEMU, managed or not, and for RAM in any kind of memory. Only pages that are in memory are read,
//! so no look makes the host allocate, map or swap in anything.
//!
//! **The guest is hostile**, and so is the VMM. See [`ebb_inspect`] for what is read of the guest. A
//! guest that lies misleads about its own figures only, and nothing is done by them.
#![forbid(unsafe_code)]

mod discover;
mod layout;
mod ram;
mod view;
mod watch;
mod watches;

pub use discover::{
    Found, Manager, discover, discover_of_managers, discover_wanted, managers_of_host, running,
};
pub use ram::NoRam;
pub use watch::{NotKnown, Observed, Usage, Watch};
pub use watches::{Seen, Watches};
