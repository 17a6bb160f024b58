//! The disks that `ebb run --disk` gives a VM. Ebb serves them, so that frames equal to a block can
//! be disk-backed by it, and no frame that a request uses is evicted.

mod pins;

use std::io;
use std::iter;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};

use ebb_api::{DiskCounts, DiskFormat, DiskRequest, DmaMode};
use ebb_block::{
    Access, Backend, Block, Direction, Dma, DmaFault, Hashes, Identity, Image, Observer, OpenError,
    Options, Reader, Segment,
};
use ebb_pager::{Digest, DigestKey, GuestDisk, IoMapping, NoDevices, Pager, SoftIommu};
use ebb_store::Page;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::{Ram, handed};
use vm_memory::GuestMemoryMmap;

use self::pins::frames_of;
pub use self::pins::{nobody_there, pin_waiting, unpin};
use crate::model::served::ImageRecord;
use crate::serve::places::Places;

/// Bits of a block's number within its disk: 256 GiB. All disks of a VM share one space of block
/// numbers, with the disk's number above these bits.
const BLOCK_BITS: u32 = 26;
/// Most disks of a VM, which keeps block numbers below the 2^40 that [`Hashes`] takes.
const DISKS_MAX: usize = 64;
const QUEUES_MAX: u32 = 4;

/// Path of the socket of disk `index` in the VM's directory.
pub fn socket(directory: &Path, index: usize) -> PathBuf {
    handed::socket_directory(directory).join(format!("disk{index}.sock"))
}

/// Opens and locks the images.
///
/// # Errors
/// One of them cannot be used: says why, and what to do.
pub fn open(wanted: &[DiskRequest]) -> Result<Vec<Image>, OpenError> {
    wanted.iter().map(open_one).collect()
}

/// Opens and locks one image.
///
/// # Errors
/// Those of [`open`].
pub fn open_one(wanted: &DiskRequest) -> Result<Image, OpenError> {
    match wanted.format {
        Some(DiskFormat::Raw) => Image::open_raw(&wanted.path, wanted.readonly),
        None => Image::open(&wanted.path, wanted.readonly),
    }
}

/// Opens and locks the images of a VM whose daemon has died. They must be those on record, if there
/// is a record.
///
/// # Errors
/// One of them cannot be used, or is not the image on record: says why, and what to do.
pub fn reopen(wanted: &[DiskRequest], known: &[ImageRecord]) -> Result<Vec<Image>, OpenError> {
    let known = known.iter().map(|image| Some(image.identity())).chain(iter::repeat(None));
    let reopen = |(disk, known): (&DiskRequest, _)| Image::reopen(&disk.path, disk.readonly, known);
    wanted.iter().zip(known).map(reopen).collect()
}

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

/// What the pager and the disks of one VM know of each other.
pub struct SharedDisks {
    images: Vec<ImageRecord>,
    hashes: Hashes,
    digest_key: Arc<DigestKey>,
    readers: Vec<Reader>,
    pager: OnceLock<Weak<Pager>>,
    dma: Vec<DmaMode>,
    /// For disks in strict DMA mode.
    iommu: OnceLock<Arc<SoftIommu>>,
    /// For each disk, where Ebb has what its front end shares.
    places: Vec<Places>,
}

impl SharedDisks {
    /// For these images, and a VM with this much memory.
    ///
    /// # Errors
    /// No random key is to be had, or those of fstat(2).
    pub fn new(
        images: &[Image],
        wanted: &[DiskRequest],
        memory_bytes: u64,
    ) -> io::Result<Arc<SharedDisks>> {
        let digest_key = Arc::new(DigestKey::random()?);
        // A guest has no more blocks in memory than it has frames.
        let room = if images.is_empty() { 0 } else { memory_bytes / FRAME_BYTES };
        let record = |image: &Image| {
            let Identity { device, inode } = image.identity()?;
            Ok(ImageRecord { device, inode })
        };
        Ok(Arc::new(SharedDisks {
            images: images.iter().map(record).collect::<io::Result<_>>()?,
            hashes: Hashes::new(room, Arc::clone(&digest_key)),
            digest_key,
            readers: images.iter().map(Image::reader).collect(),
            pager: OnceLock::new(),
            dma: wanted.iter().map(|disk| disk.dma).collect(),
            iommu: OnceLock::new(),
            places: images.iter().map(|_| Places::default()).collect(),
        }))
    }

    /// Identities of the images, for the record.
    pub fn images(&self) -> Vec<ImageRecord> {
        self.images.clone()
    }

    /// Sets the pager that pins frames.
    pub fn serve_with(&self, pager: &Arc<Pager>) {
        // A VM has one pager all its life.
        let _ = self.pager.set(Arc::downgrade(pager));
    }

    /// Whether any disk is in strict DMA mode.
    pub fn is_strict(&self) -> bool {
        self.dma.contains(&DmaMode::Strict)
    }

    /// What must be told of frames that come and go, on behalf of the disks.
    pub fn devices(&self, ram: &Arc<Ram>) -> Box<dyn IoMapping> {
        match self.is_strict() {
            true => Box::new(Arc::clone(self.iommu.get_or_init(|| Arc::new(SoftIommu::new(ram))))),
            false => Box::new(NoDevices),
        }
    }

    /// The key of the blocks' digests.
    pub fn digest_key(&self) -> Arc<DigestKey> {
        Arc::clone(&self.digest_key)
    }

    /// Removes frames from this process's page table where disks have them mapped.
    pub fn forget(&self, frames: FrameRange) {
        self.places.iter().for_each(|places| places.forget(frames));
    }

    /// Number of blocks that are known by content.
    pub fn tracked_blocks(&self) -> u64 {
        self.hashes.used()
    }
}

/// The disks as the pager sees them.
pub struct Source(pub Arc<SharedDisks>);

impl GuestDisk for Source {
    fn find(&self, digest: &Digest) -> Option<u64> {
        if self.0.readers.is_empty() { None } else { self.0.hashes.find(digest) }
    }

    fn read(&self, block: u64, pages: &mut [Page]) -> io::Result<()> {
        let (disk, block) = (block >> BLOCK_BITS, block & ((1 << BLOCK_BITS) - 1));
        let readers = &self.0.readers;
        let reader = readers
            .get(disk as usize)
            .ok_or_else(|| io::Error::other("no such disk of this VM is served here"))?;
        // Read-ahead does not know where the disk ends.
        let there = reader.blocks().saturating_sub(block).min(pages.len() as u64) as usize;
        match pages.get_mut(..there) {
            Some(pages) if !pages.is_empty() => reader.read(block, pages),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Connects one disk with guest memory: pins for it, and observes the blocks that move.
struct Port {
    shared: Arc<SharedDisks>,
    disk: usize,
}

impl Port {
    fn pager(&self) -> Option<Arc<Pager>> {
        self.shared.pager.get()?.upgrade()
    }

    fn global(&self, block: u64) -> u64 {
        (self.disk as u64) << BLOCK_BITS | block
    }
}

impl Dma for Port {
    fn pin(&self, segments: &[Segment], access: Access) -> Result<(), DmaFault> {
        match self.dma() {
            DmaMode::Strict => self.pin_mapped(segments),
            DmaMode::Pinned => {
                let pager = self.pager().ok_or_else(|| nobody_there(segments))?;
                pin_waiting(&pager, segments, access)
            }
        }
    }

    fn unpin(&self, segments: &[Segment]) {
        match (self.dma(), self.shared.iommu.get(), self.pager()) {
            (DmaMode::Strict, Some(iommu), _) => {
                segments.iter().for_each(|segment| iommu.unpin(frames_of(*segment)));
            }
            (DmaMode::Pinned, _, Some(pager)) => unpin(&pager, segments),
            _ => {}
        }
    }

    fn place(
        &self,
        memory: &Arc<GuestMemoryMmap>,
        segments: &[Segment],
    ) -> Result<Option<Vec<Segment>>, DmaFault> {
        let pager = self.pager().ok_or_else(|| nobody_there(segments))?;
        self.shared.places[self.disk].place(memory, pager.ram(), segments)
    }
}

impl Port {
    fn dma(&self) -> DmaMode {
        self.shared.dma.get(self.disk).copied().unwrap_or_default()
    }

    /// Pins like a passed-through device: waits for nobody, and fails for what is not mapped.
    fn pin_mapped(&self, segments: &[Segment]) -> Result<(), DmaFault> {
        let iommu = self.shared.iommu.get().ok_or_else(|| nobody_there(segments))?;
        for (index, segment) in segments.iter().enumerate() {
            if let Err(gfn) = iommu.pin(frames_of(*segment)) {
                segments[..index].iter().for_each(|segment| iommu.unpin(frames_of(*segment)));
                return Err(DmaFault::Forbidden(gfn.gpa()));
            }
        }
        Ok(())
    }
}

impl Observer for Port {
    fn wants_content(&self) -> bool {
        true
    }

    fn before_overwrite(&self, blocks: Range<u64>) -> io::Result<()> {
        let blocks = self.global(blocks.start)..self.global(blocks.end);
        // First the blocks are no longer found, then the frames that they back are refilled.
        self.shared.hashes.forget(blocks.clone());
        match self.pager() {
            // Whoever has such a frame locked unlocks it some time.
            Some(pager) => {
                pager.devices().vacate_soon(blocks).map_err(|error| match error.kind() {
                    // The host may have memory again later: the guest's write must not fail.
                    io::ErrorKind::TimedOut | io::ErrorKind::OutOfMemory => {
                        io::ErrorKind::WouldBlock.into()
                    }
                    _ => error,
                })
            }
            // No pager can refill these frames now.
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn moved(&self, block: u64, _: Gfn, content: &Block, _: Direction) {
        self.shared.hashes.insert(self.global(block), content);
    }
}

/// Disks that are being served, at sockets in the VM's directory. Dropping this stops them: QEMU
/// then waits for the next daemon.
pub struct Disks {
    backends: Vec<Backend>,
    /// What the disks and the pager know of each other.
    pub shared: Arc<SharedDisks>,
}

impl Disks {
    /// Begins to serve the images.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub fn start(
        images: Vec<Image>,
        shared: &Arc<SharedDisks>,
        directory: &Path,
        cpus: u32,
    ) -> Result<Disks, ebb_block::StartError> {
        let options = Options { queues: queues(cpus), ..Options::default() };
        let start = |(disk, image)| {
            let port = Arc::new(Port { shared: Arc::clone(shared), disk });
            let socket = socket(directory, disk);
            let backend = Backend::start(&socket, image, port.clone(), port, options)?;
            // If QEMU connected too early, it tries again.
            handed::admit(&socket).map_err(ebb_block::StartError::Host)?;
            Ok(backend)
        };
        let backends = images.into_iter().enumerate().map(start);
        let backends = backends.collect::<Result<_, ebb_block::StartError>>()?;
        Ok(Disks { backends, shared: Arc::clone(shared) })
    }

    /// For a VM none of whose disks Ebb serves.
    ///
    /// # Errors
    /// Those of [`SharedDisks::new`].
    pub fn none() -> io::Result<Disks> {
        Ok(Disks { backends: Vec::new(), shared: SharedDisks::new(&[], &[], 0)? })
    }

    /// What all disks together have done.
    pub fn counts(&self) -> DiskCounts {
        let mut sum = DiskCounts::default();
        for counts in self.backends.iter().map(Backend::counts) {
            sum.requests += counts.requests();
            sum.failed_requests += counts.failed;
            sum.dma_faults += counts.dma_faults;
            sum.read_bytes += counts.read_bytes;
            sum.written_bytes += counts.written_bytes;
        }
        sum
    }

    /// Number of disks.
    pub fn count(&self) -> usize {
        self.backends.len()
    }
}

/// Number of a disk's queues: one for each processor, `QUEUES_MAX` at most.
pub fn queues(cpus: u32) -> u16 {
    cpus.clamp(1, QUEUES_MAX) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_was_exchanged_is_not_reopened() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("image"), directory.path().join("other"));
        for path in [&path, &other] {
            std::fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
        }
        let wanted: Vec<DiskRequest> = vec![path.to_str().unwrap().parse().unwrap()];
        let images = open(&wanted).unwrap();
        let known = SharedDisks::new(&images, &wanted, 64 << 20).unwrap().images();
        drop(images);
        // An older daemon left no record of images.
        drop(reopen(&wanted, &[]).unwrap());
        drop(reopen(&wanted, &known).unwrap());
        std::fs::rename(other, &path).unwrap();
        let why = reopen(&wanted, &known).err().unwrap().to_string();
        assert!(why.contains("not the image") && !why.contains('\n'), "{why}");
    }
}
