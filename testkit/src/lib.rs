//! What tests of several crates need, with VMs and without.
//!
//! A test [skips](require!) where it cannot run, [waits](until) for events, and restores what it
//! changes on the host ([`Undo`], [`Scratch`], [`HostSetting`]). [`forge`] is a made-up guest,
//! [`vprobe`] what a guest registers with its host.
//!
//! Everything here panics on failure, because it serves only tests and benchmarks.
#![forbid(unsafe_code)]

pub mod forge;
pub mod setting;
pub mod skip;
pub mod target;
pub mod undo;
pub mod vprobe;
pub mod wait;

pub use setting::HostSetting;
pub use undo::{Scratch, Undo};
pub use wait::{deadline, give_up, until, until_or};
