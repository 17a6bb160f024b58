//! Devices that reach the guest's memory by themselves.

use ebb_units::FrameRange;

/// What a device may reach. A device cannot wait for a fault, so a frame is
/// unmapped before it is emptied, and mapped before the guest may use it.
///
/// Called on the fault path: no allocation, no waiting.
pub trait IoMapping: Send + Sync {
    /// Devices may use these frames again; they have memory now.
    fn map(&self, frames: FrameRange);
    /// Devices may not use these frames; on return none does.
    fn unmap(&self, frames: FrameRange);
}

/// A VM whose devices all go through the VMM's own mapping, as QEMU's do:
/// their touches fault like the guest's.
pub struct NoDevices;

impl IoMapping for NoDevices {
    fn map(&self, _: FrameRange) {}
    fn unmap(&self, _: FrameRange) {}
}
