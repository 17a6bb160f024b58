//! HyperAlloc's figures: taking memory in the guest's own allocator, by itself and in
//! guests at work, and what others do there. Each row's meaning: `docs/benchmarks.md`.

mod host;
mod keeper;
mod speed;

pub mod fig11;
pub mod fig7;
pub mod tab2;

pub use host::{fig4, scan};
