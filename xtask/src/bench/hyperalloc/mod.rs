//! HyperAlloc's figures: reclaiming memory in the guest's own allocator, by itself and in guests at
//! work, and other means in comparison. `docs/benchmarks.md` explains each row.

mod host;
mod keeper;
mod speed;

pub mod fig11;
pub mod fig7;
pub mod tab2;

pub use host::{fig4, scan};
