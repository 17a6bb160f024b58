//! Where the content of every frame of a VM is: one word a huge frame, and one
//! word a frame below the huge frames that are mixed.
//!
//! The words lie in a mapped file (format: `docs/ledger.md`), so they outlive
//! the daemon; what a word says is written before the frame's memory goes.
//! Each word has its own lock bit: work on different frames never waits, and
//! the fault thread waits for nobody. It leaves a mark with the holder
//! ([`Ledger::want`]) and goes on.
#![forbid(unsafe_code)]

mod content;
mod entry;
#[cfg(not(loom))]
mod file;
#[cfg(not(loom))]
mod ledger;
// The checker sees the locks, not who looks them up.
#[cfg_attr(loom, allow(dead_code))]
mod locked;

pub use content::Content;
pub use entry::Want;
#[cfg(not(loom))]
pub use file::{LedgerError, Tables};
#[cfg(not(loom))]
pub use ledger::{Ledger, SplitError};
pub use locked::{Busy, Locked, LockedFrame};
