//! A VM: where its RAM lies, and the VMM that runs it.
//!
//! [`Ram`] translates between guest-physical addresses, the VMM's addresses and the files behind
//! them. [`layout`] asks QEMU for this. [`launch`] starts a QEMU, and [`takeover`] checks that one
//! may be managed. [`pinning`] tells what in it writes past its page table. [`memory_device`] and
//! [`balloon`] change how much memory its guest may have. [`monitor`] is the way to QEMU's monitor:
//! a socket of its own, or [`libvirt`].
#![forbid(unsafe_code)]

pub mod balloon;
pub mod command_line;
pub mod dial;
pub mod driver;
pub mod handed;
pub mod launch;
pub mod layout;
pub mod libvirt;
pub mod memory_device;
mod memory_tree;
pub mod monitor;
pub mod pinning;
pub mod qmp;
pub mod ram;
pub mod reach;
mod shown;
pub mod takeover;
pub mod unplugged;

pub use dial::dial;
pub use monitor::Monitor;
pub use qmp::Qmp;
pub use ram::{Puncher, Ram, Region};
