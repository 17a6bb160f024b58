//! Devices that reach the guest's memory by themselves.

use std::sync::Arc;

use ebb_units::FrameRange;

/// What a device may reach. A device cannot wait for a fault, so a frame is unmapped before it is
/// punched, and mapped before the guest may use it.
///
/// The methods are called on the fault path: they must not allocate or wait.
pub trait IoMapping: Send + Sync {
    /// Lets devices use these frames again; the frames have memory now.
    fn map(&self, frames: FrameRange);
    /// Forbids devices these frames; on return none uses them. `false`: a device uses one of them
    /// right now. All of them then stay mapped, and must stay resident.
    #[must_use]
    fn unmap(&self, frames: FrameRange) -> bool;
    /// Tells that something that knows nothing of devices has returned the memory of some of these
    /// frames to the host. The frames are about to get other memory, while devices still map the
    /// old.
    fn lost(&self, frames: FrameRange);
    /// Whether there may be any such device.
    fn any(&self) -> bool {
        true
    }
}

/// A VM whose devices all use the VMM's own mapping, as QEMU's do: their touches fault like the
/// guest's.
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
