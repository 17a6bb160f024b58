//! Real VMs with stock kernels on the test bench, under the real `ebb` and `ebbd`.
//!
//! A [`Host`] has a run directory of its own and, at its end, kills every process that it caused. A
//! [`Guest`] describes a VM; [`Host::run`] has Ebb start it, [`Host::qemu`] starts a QEMU that Ebb
//! does not know. In the [`Vm`], the guest's init program answers the requests of [`Vm::guest`]. A
//! complaint of the guest's kernel fails the test.
//!
//! Everything here panics on errors: it serves tests and benchmarks only. Each wait is for an
//! event, and names it if it does not come.
#![forbid(unsafe_code)]

use std::thread;
use std::time::{Duration, Instant};

mod alike;
pub mod assets;
mod complaints;
mod console;
mod disk;
pub mod docs;
mod faulty;
mod file_system;
mod guest;
mod host;
mod listening;
mod memory;
mod mount;
mod neighbour;
pub mod nested;
mod process;
mod scattered_files;
mod screen;
mod slow_disk;
pub mod soak;
mod there_and_back;
pub mod tracked;
mod vm;

pub use console::{Console, GuestError};
pub use disk::Disk;
pub use faulty::{Failing, FaultyDisk};
pub use guest::Guest;
pub use host::{Domain, Host, Libvirt, Monitors, Ran, permit};
pub use listening::Listening;
pub use memory::{MemoryDevice, Sizes};
pub use mount::SmallFs;
pub use neighbour::Neighbour;
pub use scattered_files::ScatteredFiles;
pub use screen::Screen;
pub use slow_disk::{SlowDisk, slow_disks};
use testkit::wait;
pub use testkit::{
    HostSetting, Scratch, Undo, deadline, give_up, require, setting, skip, undo, until, until_fits,
    until_or,
};
pub use there_and_back::assert_goes_and_comes_back;
pub use vm::{AccessTimes, Churn, Vm};

/// Lets time pass between the start of an action and its interruption. It does not matter which
/// instruction is hit, as long as it is another one each time.
pub fn busy_for(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        thread::yield_now();
    }
}

/// How often a test repeats what fails rarely: `usual` times, or `long` times if `EBB_LONG` is set.
pub fn rounds(usual: u32, long: u32) -> u32 {
    match std::env::var_os("EBB_LONG") {
        Some(_) => long,
        None => usual,
    }
}

/// Succeeds where there is time for long tests. `instead`: what is left out, and how to run it.
///
/// # Errors
/// There is none: `instead`.
pub fn has_time(instead: &str) -> Result<(), String> {
    std::env::var_os("EBB_LONG").map(drop).ok_or_else(|| instead.into())
}
