//! What tests of several crates need, with VMs and without.
//!
//! A test [skips](require!) where it cannot run, [waits](until) for events, and restores what it
//! changes on the host ([`Undo`], [`Scratch`], [`HostSetting`]). [`forge`] is a made-up guest,
//! [`vprobe`] what a guest registers with its host. With the feature `vhost-user`, `virtqueue`,
//! `front_end` and `disk` are the other side of a vhost-user device. With the feature `certificate`,
//! `certificate` is what a test of TLS shows.
//!
//! Everything here panics on failure, because it serves only tests and benchmarks.
#![forbid(unsafe_code)]

#[cfg(feature = "certificate")]
pub mod certificate;
#[cfg(feature = "vhost-user")]
pub mod disk;
pub mod forge;
#[cfg(feature = "vhost-user")]
pub mod front_end;
pub mod mounted;
pub mod setting;
pub mod skip;
pub mod target;
pub mod undo;
#[cfg(feature = "vhost-user")]
pub mod virtqueue;
pub mod vprobe;
pub mod wait;

pub use mounted::mounted;
pub use setting::HostSetting;
pub use undo::{Scratch, Undo};
pub use wait::{deadline, give_up, until, until_fits, until_or};
