//! Disks and virtio-mem devices that Ebb serves a VM, as they are on record.

use ebb_block::Identity;
use ebb_units::{Gpa, HUGE_BYTES};
use ebb_virtio_mem::Geometry;
use serde::{Deserialize, Serialize};

/// Identity of an image: which file or block device it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Device number: of the file system, or of the block device itself.
    pub device: u64,
    /// The file's inode number; 0 for a block device.
    pub inode: u64,
}

impl ImageRecord {
    /// The record of an image with this identity.
    pub fn of(identity: Identity) -> ImageRecord {
        let Identity { device, inode } = identity;
        ImageRecord { device, inode }
    }

    /// The identity, to compare with that of the opened image.
    pub fn identity(self) -> Identity {
        Identity { device: self.device, inode: self.inode }
    }
}

/// A virtio-mem device on record.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct GrowthRecord {
    /// Where its region begins in guest-physical memory.
    pub address: u64,
    /// Size of its region in bytes.
    pub bytes: u64,
    /// Whether blocks get all of their memory when they are plugged.
    pub prealloc: bool,
}

impl GrowthRecord {
    /// Geometry of the virtio-mem device on this node.
    pub fn geometry(self, node: u16) -> Geometry {
        Geometry {
            start: Gpa(self.address),
            region_bytes: self.bytes,
            block_bytes: HUGE_BYTES,
            node: Some(node),
        }
    }
}
