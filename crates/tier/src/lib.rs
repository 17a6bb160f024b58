//! Where a VM's pages are best: tiers of memory, and what moves between them.
//!
//! A *tier* is a kind of memory. A VM's *ladder* names its tiers, fastest first ([`Ladder`]).
//! [`plan::plan`] finds what to exchange between them, from how hot each page is. [`Pool`] says how
//! much of the fast memory each VM may have. [`carry_out`] then moves pages, by each [`Tier`]'s own
//! means. `docs/tiers.md` describes it all. The paper is vTMM (EuroSys '23), sections 3.3 to 3.5.
#![forbid(unsafe_code)]

mod exchange;
pub mod host;
pub mod ladder;
pub mod mover;
mod node;
mod paged;
pub mod plan;
pub mod pool;
mod rate_limiter;
mod tier;

pub use exchange::{Exchanged, carry_out};
pub use ladder::{Ladder, LadderError, Rung, TierKind};
pub use mover::Mover;
pub use node::{Node, Pages};
pub use paged::{Home, MemoryTier, Stored, home};
pub use plan::{Heat, Move, PagePlace, Plan, Rules, Step};
pub use pool::{Limits, Need, Pool, PoolError};
pub use rate_limiter::RateLimiter;
pub use tier::{Outcome, Tally, Tier, TierError};
