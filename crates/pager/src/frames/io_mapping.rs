//! Devices that reach the guest's memory by themselves.

use std::sync::Arc;

use ebb_units::FrameRange;

/// What a device may reach. A device cannot wait for a fault, so a frame is
/// unmapped before it is emptied, and mapped before the guest may use it.
///
/// Called on the fault path: no allocation, no waiting.
pub trait IoMapping: Send + Sync {
    /// Devices may use these frames again; they have memory now.
    fn map(&self, frames: FrameRange);
    /// Devices may not use these frames; on return none does. `false`: a device
    /// uses one of them right now. All of them stay mapped then, and must stay
    /// where they are.
    #[must_use]
    fn unmap(&self, frames: FrameRange) -> bool;
    /// Somebody who does not know of devices has taken the memory of some of these
    /// frames, which are about to get other memory: devices still have the old.
    fn lost(&self, frames: FrameRange);
    /// Whether there may be any such device.
    fn any(&self) -> bool {
        true
    }
}

/// A VM whose devices all go through the VMM's own mapping, as QEMU's do:
/// their touches fault like the guest's.
pub struct NoDevices;

impl IoMapping for NoDevices {
    fn map(&self, _: FrameRange) {}

    fn unmap(&self, _: FrameRange) -> bool {
        true
    }

    fn lost(&self, _: FrameRange) {}

    fn any(&self) -> bool {
        false
    }
}

impl<Shared: IoMapping + ?Sized> IoMapping for Arc<Shared> {
    fn map(&self, frames: FrameRange) {
        Shared::map(self, frames);
    }

    fn unmap(&self, frames: FrameRange) -> bool {
        Shared::unmap(self, frames)
    }

    fn lost(&self, frames: FrameRange) {
        Shared::lost(self, frames);
    }

    fn any(&self) -> bool {
        Shared::any(self)
    }
}
