//! A VM's disks, as they and its pager know each other.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use ebb_block::{Hashes, Identity, Image, Reader};
use ebb_pager::{DigestKey, IoMapping, NoDevices, Pager, SoftIommu};
use ebb_units::{FRAME_BYTES, FrameRange};
use ebb_vm::Ram;

use crate::dma::PagerDma;

/// Bits of a block's number within its disk: 256 GiB. All disks of a VM share one space of block
/// numbers, with the disk's number above these bits.
const BLOCK_BITS: u32 = 26;
/// Most disks of a VM, which keeps block numbers below the 2^40 that [`Hashes`] takes.
const DISKS_MAX: usize = 64;

/// Returns the number that a disk's block has among the blocks of all disks.
pub(crate) fn block_of(disk: usize, block: u64) -> u64 {
    (disk as u64) << BLOCK_BITS | block
}

/// Returns the disk, and the number of the block within it.
pub(crate) fn disk_of(block: u64) -> (usize, u64) {
    ((block >> BLOCK_BITS) as usize, block & ((1 << BLOCK_BITS) - 1))
}

/// What the pager and the disks of one VM know of each other.
pub struct SharedDisks {
    pub(crate) disks: Vec<Disk>,
    /// Blocks of all disks by their content.
    pub(crate) hashes: Hashes,
    digest_key: Arc<DigestKey>,
    /// For disks in strict DMA mode.
    iommu: OnceLock<Arc<SoftIommu>>,
}

/// One of the disks.
pub(crate) struct Disk {
    pub(crate) path: PathBuf,
    identity: Identity,
    pub(crate) reader: Reader,
    pub(crate) dma: PagerDma,
    /// Whether it is in strict DMA mode: it behaves like a device that is passed through.
    pub(crate) is_strict: bool,
}

impl SharedDisks {
    /// Checks that the disks' number and sizes fit the space of block numbers.
    ///
    /// # Errors
    /// Says in one line what does not fit.
    pub fn check(images: &[Image]) -> Result<(), String> {
        if images.len() > DISKS_MAX {
            return Err(format!("a VM can have {DISKS_MAX} disks, not {}", images.len()));
        }
        let large = images.iter().find(|image| image.bytes() / FRAME_BYTES >= 1 << BLOCK_BITS);
        large.map_or(Ok(()), |image| {
            Err(format!("{}: an image can have 256 GiB at most", image.path().display()))
        })
    }

    /// For these images, and a VM with this much memory. `are_strict` says of each image whether its
    /// disk is in strict DMA mode.
    ///
    /// # Errors
    /// No random key is to be had, or those of fstat(2).
    pub fn new(
        images: &[Image],
        are_strict: impl IntoIterator<Item = bool>,
        memory_bytes: u64,
    ) -> io::Result<Arc<SharedDisks>> {
        let digest_key = Arc::new(DigestKey::random()?);
        // A guest has no more blocks in memory than it has frames.
        let room = if images.is_empty() { 0 } else { memory_bytes / FRAME_BYTES };
        let disk = |(image, is_strict): (&Image, bool)| {
            Ok(Disk {
                path: image.path().to_owned(),
                identity: image.identity()?,
                reader: image.reader(),
                dma: PagerDma::default(),
                is_strict,
            })
        };
        Ok(Arc::new(SharedDisks {
            disks: images.iter().zip(are_strict).map(disk).collect::<io::Result<_>>()?,
            hashes: Hashes::new(room, Arc::clone(&digest_key)),
            digest_key,
            iommu: OnceLock::new(),
        }))
    }

    /// Identities of the images, in order.
    pub fn identities(&self) -> impl Iterator<Item = Identity> {
        self.disks.iter().map(|disk| disk.identity)
    }

    /// Sets the pager that pins frames.
    pub fn serve_with(&self, pager: &Arc<Pager>) {
        self.disks.iter().for_each(|disk| disk.dma.serve_with(pager));
    }

    /// Whether any disk is in strict DMA mode.
    pub fn is_strict(&self) -> bool {
        self.disks.iter().any(|disk| disk.is_strict)
    }

    /// What must be told of frames that come and go, on behalf of the disks.
    pub fn devices(&self, ram: &Arc<Ram>) -> Box<dyn IoMapping> {
        match self.is_strict() {
            true => Box::new(Arc::clone(self.iommu.get_or_init(|| Arc::new(SoftIommu::new(ram))))),
            false => Box::new(NoDevices),
        }
    }

    /// The IOMMU of the disks in strict DMA mode, once the VM has a pager.
    pub(crate) fn iommu(&self) -> Option<&SoftIommu> {
        self.iommu.get().map(|iommu| &**iommu)
    }

    /// The key of the blocks' digests.
    pub fn digest_key(&self) -> Arc<DigestKey> {
        Arc::clone(&self.digest_key)
    }

    /// Removes frames from this process's page table where disks have them mapped.
    pub fn forget(&self, frames: FrameRange) {
        self.disks.iter().for_each(|disk| disk.dma.forget(frames));
    }

    /// Number of blocks that are known by content.
    pub fn tracked_blocks(&self) -> u64 {
        self.hashes.used()
    }
}
