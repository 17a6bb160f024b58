//! Why a device does not start, has stopped, or cannot have a size.

use std::io;

use thiserror::Error;

/// Why a device does not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The memory could not be made to agree with the saved state.
    #[error("the memory of a virtio-mem device: {0}")]
    Memory(#[source] io::Error),
    /// The state could not be kept.
    #[error(transparent)]
    Record(#[from] Stopped),
}

/// The device has stopped: its state could not be kept, or its memory could not be brought back to
/// what the driver knows.
///
/// A stopped device answers nothing, so the driver learns nothing that may be untrue. A device that
/// starts from the kept state can go on.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("the virtio-mem device has stopped: {0}")]
pub struct Stopped(pub(super) String);

/// A size that the device cannot have.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SizeError {
    /// The size is not a multiple of the block size (section 5.15.4.2).
    #[error("the size must be a multiple of {block_bytes} bytes")]
    Alignment {
        /// The device's block size.
        block_bytes: u64,
    },
    /// The size exceeds the region.
    #[error("the size must be {region_bytes} bytes at most")]
    TooLarge {
        /// Size of the device's region.
        region_bytes: u64,
    },
    /// The device has stopped, and answers nothing.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}
