//! What a touch of the region means: for whoever serves faults there.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use ebb_units::Gpa;

use crate::block_map::BlockMap;
use crate::geometry::Geometry;

/// What a touch of an address is: virtio 1.2, sections 5.15.6.1 and 5.15.6.2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// Of another device's memory, or none.
    Outside,
    /// Of memory that the guest has.
    Plugged,
    /// A read of unplugged memory that the guest must be allowed; what it finds there may
    /// be anything.
    Readable,
    /// Of memory that the guest must keep off. It was counted.
    Forbidden,
}

/// Tells touches apart. Waits for nobody, and allocates nothing.
pub struct Guard {
    pub(crate) blocks: BlockMap,
    geometry: Geometry,
    usable_bytes: AtomicU64,
    /// `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE` was negotiated.
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

    /// What it means that a processor of the guest touches `gpa`. For a touch by a device
    /// pass `is_write` always: no device may read unplugged memory, either.
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

    /// Touches that were [`Touch::Forbidden`].
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
