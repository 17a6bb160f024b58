//! Errors of the guest's side, of the host's side, and of layouts.

/// Why an operation of the guest's side did nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The order is greater than [`MAX_ORDER`](crate::layout::MAX_ORDER).
    #[error("there are no blocks of this order")]
    Order,
    /// The frame is not in the zone, or not at a multiple of the block's size.
    #[error("no block of this order begins at this frame")]
    Frame,
    /// No block of this order is free.
    #[error("no block of this order is free")]
    Memory,
    /// The requested block is not free as a whole.
    #[error("the block is in use, or a part of it is")]
    Taken,
    /// The block to put is not allocated as a whole, or belongs to the host.
    #[error("the block is not allocated")]
    NotAllocated,
}

/// Why an operation of the host's side did nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HostError {
    /// The zone has no such area.
    #[error("no such area")]
    Outside,
    /// The area is not free as a whole.
    #[error("the area is in use")]
    InUse,
    /// The area is not hard-reclaimed.
    #[error("the area is not the host's")]
    NotTaken,
    /// The guest keeps changing the area faster than the host can.
    #[error("the area changes all the time")]
    Busy,
}

/// Why a piece of memory is not a zone's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// The header's magic number is wrong.
    #[error("no allocator's header: its magic number is {0:#x}")]
    Magic(u64),
    /// The header's version is not ours.
    #[error("the allocator's layout is version {0}, not {version}", version = crate::layout::VERSION)]
    Version(u32),
    /// The zone's first frame is too high, or not aligned to
    /// [`ZONE_ALIGN_FRAMES`](crate::layout::ZONE_ALIGN_FRAMES).
    #[error("a zone cannot begin at frame {0}")]
    Base(u64),
    /// The zone has no frames, or more than [`MAX_FRAMES`](crate::layout::MAX_FRAMES).
    #[error("a zone cannot have {0} frames")]
    Frames(u64),
    /// The zone has no cores, or more than [`MAX_CORES`](crate::layout::MAX_CORES).
    #[error("a zone cannot have slots for {0} cores")]
    Cores(u32),
    /// An array's address is not a multiple of 64.
    #[error("an array at {0:#x} is not aligned")]
    Address(u64),
    /// A given array is too short.
    #[error("an array is too short for the zone")]
    Short,
}
