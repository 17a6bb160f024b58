//! What is on record of the disks and the memory devices that Ebb serves a VM.

use ebb_block::Identity;
use ebb_units::{Gpa, HUGE_BYTES};
use ebb_virtio_mem::Geometry;
use serde::{Deserialize, Serialize};

/// Which file or block device an image is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageRecord {
    /// The file system's device number, or the block device's own.
    pub device: u64,
    /// The file's inode number; 0 for a block device.
    pub inode: u64,
}

impl ImageRecord {
    /// As the opened image tells it.
    pub fn identity(self) -> Identity {
        Identity { device: self.device, inode: self.inode }
    }
}

/// One device on record.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct GrowthRecord {
    /// Where its region begins in guest-physical memory.
    pub address: u64,
    /// How large that is.
    pub bytes: u64,
    /// Blocks get all their memory when they are plugged.
    pub prealloc: bool,
}

impl GrowthRecord {
    /// As the virtio-mem device of this node has it.
    pub fn geometry(self, node: u16) -> Geometry {
        Geometry {
            start: Gpa(self.address),
            region_bytes: self.bytes,
            block_bytes: HUGE_BYTES,
            node: Some(node),
        }
    }
}
