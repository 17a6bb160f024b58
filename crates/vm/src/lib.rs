//! A VM taken hold of: where its RAM lies, and the VMM that runs it.
//!
//! [`Ram`] translates between guest-physical addresses, the VMM's addresses
//! and the files behind them; [`layout`] asks QEMU for that; [`launch`] starts
//! a QEMU, [`takeover`] makes sure that one may be held.
#![forbid(unsafe_code)]

pub mod launch;
pub mod layout;
pub mod qmp;
pub mod ram;
pub mod takeover;

pub use qmp::Qmp;
pub use ram::{Ram, Region};
