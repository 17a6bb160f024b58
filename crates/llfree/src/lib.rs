//! LLFree: a lock-free page-frame allocator whose state a guest's kernel and the host change at the
//! same time.
//!
//! [`Zone`] is the guest's side: it gets and puts blocks of order 0 to 10. [`Host`] is the host's
//! side: it reclaims areas (huge frames) that are free as a whole, and returns them. Both work in
//! place on arrays of words that the caller provides. `guest/llfree` has the same layout and the
//! same names in C. `docs/llfree.md` draws the layout and describes the protocol.
#![cfg_attr(not(loom), no_std)]
#![forbid(unsafe_code)]

pub mod layout;

mod area;
mod atomic;
mod counters;
mod error;
mod fullest;
mod get;
mod header;
mod host;
mod put;
mod rows;
mod search;
mod slot;
mod tree;
mod verify;
mod zone;

#[cfg(all(test, loom))]
mod model;

pub use error::{Error, HostError, LayoutError};
pub use header::Header;
pub use host::{CHUNK_AREAS, Host};
pub use layout::{Counts, Layout};
pub use verify::Disagreement;
pub use zone::{Fill, Kind, Parts, Touch, Zone};
