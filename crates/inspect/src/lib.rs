//! What a stock Linux guest's frames are, read from its memory alone.
//!
//! No agent, no kernel module and no symbol file is needed. The guest's kernel describes itself in
//! a VMCOREINFO note, and everything else follows from that note.
//!
//! ```text
//! vmcoreinfo  find and parse the note
//! paging      kernel virtual address -> guest-physical address
//! memmap      frame -> address of its struct page
//! page        struct page -> what the frame is
//! lru         how the guest's own reclaim sees it
//! zones       nodes, zones, their free lists
//! counters    what the kernel itself counts
//! scan        every frame's kind; all free blocks
//! victims     which free blocks to reclaim
//! look        the metadata of blocks as it is now
//! freed       whether a frame was freed since it was in use
//! settled     whether no request in flight writes to a frame
//! needed      the frames that every look reads
//! roots       the roots of the processes' page tables
//! llfree      where a kernel that shares its allocator keeps its state
//! guest       all of these together, behind the gate
//! registered  a guest, Linux or not, that has registered its page metadata
//! free_blocks what V-Probe asks of either
//! ```
//!
//! **The guest is hostile.** Each word is read from it once, then bounded and checked. The guest
//! chooses no loop length, no index and no allocation beyond what the size of its RAM allows. A
//! guest that lies can mislead Ebb about its own frames only.
//!
//! Kernels: 5.10 to 7.3 on x86-64, KASLR or not, 4- and 5-level paging.
#![forbid(unsafe_code)]

mod counters;
mod error;
mod free_blocks;
mod freed;
mod guest;
mod llfree;
mod look;
mod lru;
mod memmap;
mod memory;
mod needed;
mod page;
mod paging;
mod registered;
mod roots;
mod scan;
mod settled;
mod snapshot;
mod victims;
mod vmcoreinfo;
mod zones;

pub use counters::{CounterPlaces, Counters};
pub use error::Untrusted;
pub use free_blocks::FreeBlocks;
pub use guest::Guest;
pub use llfree::LlfreeZone;
pub use look::{Head, Look};
pub use lru::Lru;
pub use memmap::{Memmap, Run};
pub use memory::GuestMemory;
pub use page::{MAX_ORDER, PAGE_BYTES, PageKind, PageLayout, PageWords};
pub use paging::{PageTables, Walk};
pub use registered::{
    NotRegistered, RECORDS_MAX, Registered, answer_record, find_records, may_hold_record,
    registration_digest,
};
pub use scan::FrameCounts;
pub use snapshot::Snapshot;
pub use victims::{BuddyBlock, ChosenBlocks, RESERVE_BYTES, Request};
pub use vmcoreinfo::{NOTES_MAX, Note, begins_note, find_notes, may_hold_note};
pub use zones::{End, FreeList, ListFault, Sight, Zone, ZoneKind, Zones};
