//! What can go wrong, by who asked.

/// Why the guest's side did nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// Greater than [`MAX_ORDER`](crate::layout::MAX_ORDER).
    #[error("there are no blocks of this order")]
    Order,
    /// Not in the zone, or not at a multiple of the block's size.
    #[error("no block of this order begins at this frame")]
    Frame,
    /// No block of this order is free.
    #[error("no block of this order is free")]
    Memory,
    /// The block asked for is not free as a whole.
    #[error("the block is in use, or a part of it is")]
    Taken,
    /// The block given back is not allocated as a whole, or is the host's.
    #[error("the block is not allocated")]
    NotAllocated,
}

/// Why the host's side did nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HostError {
    /// No such area in the zone.
    #[error("no such area")]
    Outside,
    /// The area is not free as a whole.
    #[error("the area is in use")]
    InUse,
    /// The area is not one that the host took.
    #[error("the area is not the host's")]
    NotTaken,
    /// The guest changes the area faster than the host can.
    #[error("the area changes all the time")]
    Busy,
}

/// Why a piece of memory is no zone's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// Of the header.
    #[error("no allocator's header: its magic number is {0:#x}")]
    Magic(u64),
    /// Of the header.
    #[error("the allocator's layout is version {0}, not {version}", version = crate::layout::VERSION)]
    Version(u32),
    /// See [`ZONE_ALIGN_FRAMES`](crate::layout::ZONE_ALIGN_FRAMES).
    #[error("a zone cannot begin at frame {0}")]
    Base(u64),
    /// See [`MAX_FRAMES`](crate::layout::MAX_FRAMES).
    #[error("a zone cannot have {0} frames")]
    Frames(u64),
    /// See [`MAX_CORES`](crate::layout::MAX_CORES).
    #[error("a zone cannot have slots for {0} cores")]
    Cores(u32),
    /// An array's address is not a multiple of 64.
    #[error("an array at {0:#x} is not aligned")]
    Address(u64),
    /// An array handed in is too short.
    #[error("an array is too short for the zone")]
    Short,
}
