//! Where the content of every frame of a VM is: one word for each huge frame, and one word for
//! each frame of the huge frames that are mixed.
//!
//! The words are in a mapped file (format: `docs/ledger.md`), so they outlive the daemon. A word is
//! written before the frame's memory goes. Each word has its own lock bit, so work on different
//! frames never waits. The fault thread waits for nobody: it leaves a mark for the holder of the
//! lock ([`Ledger::want`]) and goes on.
#![forbid(unsafe_code)]

mod content;
mod entry;
#[cfg(not(loom))]
mod file;
#[cfg(not(loom))]
mod ledger;
// The model checker uses the locks, but not what looks them up.
#[cfg_attr(loom, allow(dead_code))]
mod locked;

pub use content::Content;
pub use entry::Want;
#[cfg(not(loom))]
pub use file::{LedgerError, Tables};
#[cfg(not(loom))]
pub use ledger::{Ledger, SplitError};
pub use locked::{Busy, Locked, LockedFrame};
