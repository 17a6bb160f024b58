//! How hot a VM's frames are: which were used in each window of time, how often in a monitoring,
//! and which of them are the hottest (vTMM, sections 3.2 and 3.3).
//!
//! ```text
//! tracker   one round: what was used since the round before; clears the bits
//! guest     ... by the accessed bits in the guest's own page tables
//! host      ... by the VMM's page table, for guests that are not known
//! idle      ... by the host kernel's idle page tracking, for guests that are not known
//! entry     an entry of an x86-64 page table
//! door      where a bit in a guest's page table is cleared
//! levels    the multi-level queue: pages used again and again are looked at less often
//! degree    reads and writes, weighted
//! sort      all frames by degree, coldest first; the hot set
//! schedule  when to monitor
//! ```
//!
//! `docs/tiering.md` and `docs/decisions/0023-*` say what clears which bit, and why it can harm no
//! byte of the guest's.
#![forbid(unsafe_code)]

mod degree;
mod door;
mod entry;
mod guest;
mod host;
mod idle;
mod levels;
mod schedule;
mod sort;
mod tracker;

pub use degree::{Weights, ZeroWeight};
pub use door::{ENTRIES, Entries, LockedTables, PagerTables, TableMemory};
pub use entry::Entry;
pub use guest::{GuestTracker, Roots};
pub use host::{HostPages, HostTracker};
pub use idle::IdleTracker;
pub use levels::{BYTES_PER_PAGE, Levels, TOP_LEVEL, Uses, WINDOWS_MAX};
pub use schedule::{BadSchedule, Schedule, ScheduleSettings, Step};
pub use sort::Sorted;
pub use tracker::{Access, Observer, Round, TrackError, Tracker, Verdict, Walk};
