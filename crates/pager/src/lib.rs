//! The pager: serves the faults of a VM, and reclaims, evicts and refills its frames.
//!
//! The fault path asks the ledger and nothing else. It allocates nothing, takes no lock wider than
//! a huge frame, never speaks to the VMM, and never waits for a thread that is punching the frame:
//! it leaves a mark in the ledger, and the holder of the lock wakes the guest when it is done.
#![forbid(unsafe_code)]

mod device;
mod evict;
mod fault;
mod folios;
mod frames;
mod give_back;
mod guest;
mod pager;
mod reclaim;
mod residency;
mod support;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod threads;

pub use device::access::DeviceAccess;
pub use device::pluggable::Pluggable;
pub use ebb_digest::{Digest, DigestKey};
pub use ebb_sys::panics::panic_text;
pub use evict::Evictor;
pub use evict::evicted::Evicted;
pub use fault::installer::Installer;
pub use fault::room::{LimitRoom, OpenGate};
pub use fault::sentry::Sentry;
pub use fault::server::{FaultServer, Restored};
pub use fault::sharer::{Sharer, Sharing};
pub use folios::{FolioMap, Grain};
pub use frames::Frames;
pub use frames::io_mapping::{IoMapping, NoDevices};
pub use frames::soft_iommu::SoftIommu;
pub use give_back::{Returner, Zeros};
pub use guest::tables::{GuestTables, LockedMetadata};
pub use pager::{Pager, PagerParts};
pub use reclaim::claim::{Blocks, Claim, Committed};
pub use residency::Residency;
pub use residency::dead::Witness;
pub use residency::digests::Digests;
pub use residency::disk_backed::{GuestDisk, NoDisk};
pub use residency::huge::LockedHuge;
pub use residency::judge::{Judge, NothingKnown};
pub use residency::view::View;
pub use support::counters::Counters;
pub use support::latency::{GROUP_ENDS_NS, GROUPS, Latency};
pub use threads::fault::FaultThread;
pub use threads::refill::RefillThreads;
