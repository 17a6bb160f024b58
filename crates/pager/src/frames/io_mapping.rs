//! Devices that reach the guest's memory by themselves.

use std::io;
use std::sync::Arc;

use ebb_units::{FrameRange, Gfn};

/// What a device may reach. A device cannot wait for a fault, so a frame is unmapped before it is
/// punched, and mapped before the guest may use it.
///
/// The methods are called on the fault path: they must not allocate, and may wait only for a call of
/// the kernel's that maps or unmaps.
pub trait IoMapping: Send + Sync {
    /// Lets devices use these frames again; the frames have memory now.
    ///
    /// # Errors
    /// Devices cannot use all of them yet. So the guest must not go on with any.
    fn map(&self, frames: FrameRange) -> io::Result<()>;
    /// Forbids devices these frames; on return none uses them. `false`: a device uses one of them
    /// right now. All of them then stay mapped, and must stay resident.
    #[must_use]
    fn unmap(&self, frames: FrameRange) -> bool;
    /// Tells that something that knows nothing of devices has returned the memory of some of these
    /// frames to the host. The frames are about to get other memory, while devices still map the
    /// old.
    fn lost(&self, frames: FrameRange);
    /// Notes at the start that an earlier process had taken these frames, or was about to: devices
    /// may not use them until [`IoMapping::map`]. `false`: as for [`IoMapping::unmap`].
    #[must_use]
    fn was_taken(&self, frames: FrameRange) -> bool {
        self.unmap(frames)
    }
    /// Whether this block may be taken, with the frame that has its metadata write-protected. Where
    /// it may not, nothing must be protected either.
    fn allows(&self, _block: FrameRange, _metadata: Gfn) -> bool {
        true
    }
    /// Whether huge frames are mapped and unmapped only as a whole.
    fn is_whole(&self) -> bool {
        false
    }
    /// Whether there may be any such device.
    fn any(&self) -> bool {
        true
    }
}

/// A VM whose devices all use the VMM's own mapping, as QEMU's do: their touches fault like the
/// guest's.
pub struct NoDevices;

impl IoMapping for NoDevices {
    fn map(&self, _: FrameRange) -> io::Result<()> {
        Ok(())
    }

    fn unmap(&self, _: FrameRange) -> bool {
        true
    }

    fn lost(&self, _: FrameRange) {}

    fn any(&self) -> bool {
        false
    }
}

impl<Shared: IoMapping + ?Sized> IoMapping for Arc<Shared> {
    fn map(&self, frames: FrameRange) -> io::Result<()> {
        Shared::map(self, frames)
    }

    fn unmap(&self, frames: FrameRange) -> bool {
        Shared::unmap(self, frames)
    }

    fn lost(&self, frames: FrameRange) {
        Shared::lost(self, frames);
    }

    fn was_taken(&self, frames: FrameRange) -> bool {
        Shared::was_taken(self, frames)
    }

    fn allows(&self, block: FrameRange, metadata: Gfn) -> bool {
        Shared::allows(self, block, metadata)
    }

    fn is_whole(&self) -> bool {
        Shared::is_whole(self)
    }

    fn any(&self) -> bool {
        Shared::any(self)
    }
}
