//! The pager: serves the faults of a VM, and empties its frames.
//!
//! The fault path asks the ledger and nothing else. It allocates nothing,
//! takes no lock that is wider than a frame or a huge frame, never speaks to
//! the VMM, and never waits for whoever empties frames meanwhile: it leaves a
//! mark in the ledger, and the holder serves the fault when it is done.
#![forbid(unsafe_code)]

// The machine that the tests share names this crate from outside.
#[cfg(test)]
extern crate self as ebb_pager;

mod at_once;
mod claim;
mod coming;
mod counters;
mod dead;
mod digests;
mod disk;
mod evict;
mod failure;
mod fault_thread;
mod folios;
mod give_back;
mod going;
mod gone;
mod guarded;
mod halt;
mod hand;
mod huge;
mod install;
mod io_mapping;
mod jobs;
mod kept;
mod latency;
mod mapped;
mod owners;
mod pager;
mod panic;
mod pins;
mod place;
mod read_ahead;
mod refill;
mod soft_iommu;
mod sparse;
mod tables;
mod unmapped;
mod view;
mod write_back;
mod zero;

pub use claim::{Claim, Committed};
pub use counters::Counters;
pub use dead::Witness;
pub use digests::Digests;
pub use disk::{Disk, NoDisk};
pub use ebb_digest::{Digest, DigestKey};
pub use evict::{Evicted, Judge, NothingKnown};
pub use fault_thread::FaultThread;
pub use guarded::Sentry;
pub use huge::{HeldHuge, Sharer, Sharing};
pub use io_mapping::{IoMapping, NoDevices};
pub use jobs::RefillThreads;
pub use latency::Latency;
pub use pager::{Grain, Pager, Parts, Restored};
pub use panic::panic_text;

pub use soft_iommu::SoftIommu;
pub use tables::HeldMetadata;
pub use view::View;
