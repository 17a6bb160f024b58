//! What a touch of the region means, for the code that serves faults there.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use ebb_units::Gpa;

use crate::block_map::BlockMap;
use crate::geometry::Geometry;

/// Meaning of a touch: virtio 1.2, sections 5.15.6.1 and 5.15.6.2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// The touch is outside the region.
    Outside,
    /// The touch is of plugged memory.
    Plugged,
    /// A read of unplugged memory that the guest must be allowed. It may see any content.
    Readable,
    /// A touch of memory that the guest must not touch: a violation. It was counted.
    Forbidden,
}

/// Tells touches apart. It waits for nobody, and allocates nothing.
pub struct Guard {
    pub(crate) blocks: BlockMap,
    geometry: Geometry,
    usable_bytes: AtomicU64,
    /// Whether `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE` was negotiated.
    inaccessible: AtomicBool,
    violations: AtomicU64,
}

impl Guard {
    pub(crate) fn new(geometry: Geometry) -> Guard {
        Guard {
            blocks: BlockMap::new(geometry.blocks()),
            geometry,
            usable_bytes: AtomicU64::new(0),
            inaccessible: AtomicBool::new(false),
            violations: AtomicU64::new(0),
        }
    }

    /// Tells the meaning of a touch of `gpa` by a processor of the guest. For a touch by a device,
    /// pass `is_write` always: no device may even read unplugged memory.
    pub fn judge(&self, gpa: Gpa, is_write: bool) -> Touch {
        let Some(block) = self.geometry.block(gpa) else { return Touch::Outside };
        if self.blocks.is_plugged(block) {
            return Touch::Plugged;
        }
        let usable = gpa.0 - self.geometry.start.0 < self.usable_bytes.load(Acquire);
        if usable && !is_write && !self.inaccessible.load(Acquire) {
            return Touch::Readable;
        }
        self.violations.fetch_add(1, Relaxed);
        Touch::Forbidden
    }

    /// Whether the guest may read unplugged memory. Then a touch that is reported as a write proves
    /// no violation: under KVM's asynchronous page faults, reads are reported as writes too.
    pub fn may_read(&self) -> bool {
        !self.inaccessible.load(Acquire)
    }

    /// Returns the number of touches that were [`Touch::Forbidden`].
    pub fn violations(&self) -> u64 {
        self.violations.load(Relaxed)
    }

    pub(crate) fn set_usable(&self, bytes: u64) {
        self.usable_bytes.store(bytes, Release);
    }

    pub(crate) fn set_inaccessible(&self, inaccessible: bool) {
        self.inaccessible.store(inaccessible, Release);
    }
}
