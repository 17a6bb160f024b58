//! VSwapper's figures: guests with less memory than they believe to have, by Linux's own swapping
//! of QEMU, by the balloon, and by Ebb. `docs/benchmarks.md` explains each row.

mod bound;
mod cgroup;
pub mod compare;
pub mod held;
pub mod keeper;
pub mod linux;
pub mod medium;
mod pin;
mod pool;
pub mod rig;
pub mod setup;
mod warden;

pub mod fig10;
pub mod fig11;
pub mod fig14;
pub mod fig15;
pub mod fig9;
pub mod plentiful;
