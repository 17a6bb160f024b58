//! Where a VM's pages are best: tiers of memory, and what moves between them.
//!
//! A *tier* is a kind of memory. A VM's *ladder* names its tiers, fastest first
//! ([`Ladder`]). From how hot each page is, [`plan::plan`] tells what to exchange between
//! them, and [`Pool`] how much of the fast memory each VM may have. `docs/tiers.md` has
//! the whole; the paper is vTMM (EuroSys '23), sections 3.3 to 3.5.
#![forbid(unsafe_code)]

pub mod ladder;
pub mod plan;
pub mod pool;

pub use ladder::{Kind, Ladder, LadderError, Rung};
pub use plan::{Heat, Move, Place, Plan, Rules, Step};
pub use pool::{Limits, Need, Pool, PoolError};
