//! What a stock Linux guest's frames are, read from its memory alone.
//!
//! No agent, no module and no symbol file: the guest's kernel describes itself in
//! a VMCOREINFO note, and everything else follows from there.
//!
//! ```text
//! vmcoreinfo  find and parse the note
//! paging      kernel virtual address -> guest-physical address
//! memmap      frame -> address of its struct page
//! page        struct page -> what the frame is
//! lru         how the guest's own reclaim has it
//! zones       nodes, zones, their free lists
//! scan        every frame's kind; all free blocks
//! victims     which free blocks to take
//! look        blocks' metadata as it is now
//! freed       whether a frame was freed since it was in use
//! settled     whether no request in flight writes to a frame
//! needed      the frames that each look reads
//! roots       the roots of the processes' page tables
//! llfree      where a kernel that shares its allocator keeps it
//! guest       all of it together, behind the gate
//!
//! write_intent  whether an instruction overwrites a whole page
//! ```
//!
//! **The guest is hostile.** Whatever is read from it is read once, bounded and
//! checked; no loop's length, no index and no allocation is the guest's to
//! choose beyond what its RAM's size allows. A guest that lies can mislead Ebb
//! about its own frames only.
//!
//! Kernels: 5.10 to 7.3 on x86-64, KASLR or not, 4- and 5-level paging.
#![forbid(unsafe_code)]

mod error;
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
mod roots;
mod scan;
mod settled;
mod snapshot;
mod victims;
mod vmcoreinfo;
mod write_intent;
mod zones;

pub use error::Untrusted;
pub use guest::Guest;
pub use llfree::LlfreeZone;
pub use look::{Head, Look};
pub use lru::Lru;
pub use memmap::{Memmap, Run};
pub use memory::GuestMemory;
pub use page::{MAX_ORDER, PAGE_BYTES, PageKind, PageLayout, PageWords};
pub use paging::{Tables, Walk};
pub use scan::Counts;
pub use snapshot::Snapshot;
pub use victims::{Block, Request, Taken};
pub use vmcoreinfo::{NOTES_MAX, Note, find_notes, may_hold_note};
pub use write_intent::{CodeSize, Registers, Segment, Stopped, WriteIntent};
pub use zones::{End, FreeList, ListFault, Sight, Zone, ZoneKind, Zones};
