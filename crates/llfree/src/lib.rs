//! LLFree: a page-frame allocator without locks, whose state a guest's kernel
//! and the host work on at the same time.
//!
//! [`Zone`] is what a guest does: get and put blocks of order 0 to 10. [`Host`]
//! is what the host does: take areas, which are huge frames, that are free as a
//! whole, and give them back. Both work in place on arrays of words that are
//! handed in. The same layout and the same names stand in `guest/llfree`, in C;
//! `docs/llfree.md` draws the layout and tells the protocol.
#![cfg_attr(not(loom), no_std)]
#![forbid(unsafe_code)]

pub mod layout;

mod area;
mod atomic;
mod counters;
mod error;
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
