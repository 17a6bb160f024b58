//! The disks that `ebb run --disk` gives a VM: served here, so that frames equal to a
//! block can rest on it, and no frame that a request uses is evicted.

use std::io;
use std::iter;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, OnceLock, Weak};

use ebb_api::{DiskCounts, DiskFormat, DiskRequest, DmaMode};
use ebb_block::{
    Access, Backend, Block, Direction, Dma, DmaFault, Hashes, Identity, Image, Observer, OpenError,
    Options, Reader, Segment,
};
use ebb_pager::{Digest, DigestKey, Disk, IoMapping, NoDevices, Pager, SoftIommu};
use ebb_store::Page;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::{Ram, handed};
use vm_memory::GuestMemoryMmap;

use crate::model::served::ImageRecord;
use crate::serve::places::Places;

/// All disks of a VM share one space of block numbers: the disk's number above
/// these bits, which leaves it 256 GiB.
const BLOCK_BITS: u32 = 26;
/// So the numbers stay below the 2^40 that [`Hashes`] takes.
const DISKS_MAX: usize = 64;
const QUEUES_MAX: u32 = 4;

/// The socket of disk `index` in the VM's directory.
pub fn socket(directory: &Path, index: usize) -> PathBuf {
    handed::socket_directory(directory).join(format!("disk{index}.sock"))
}

/// Opens and locks the images.
///
/// # Errors
/// One cannot be used: why, and what to do.
pub fn open(wanted: &[DiskRequest]) -> Result<Vec<Image>, OpenError> {
    wanted.iter().map(open_one).collect()
}

/// One of them.
///
/// # Errors
/// As [`open`].
pub fn open_one(wanted: &DiskRequest) -> Result<Image, OpenError> {
    match wanted.format {
        Some(DiskFormat::Raw) => Image::open_raw(&wanted.path, wanted.readonly),
        None => Image::open(&wanted.path, wanted.readonly),
    }
}

/// The same, of a VM whose daemon has died: the images that are on record, if they are there.
///
/// # Errors
/// One cannot be used, or is another: why, and what to do.
pub fn reopen(wanted: &[DiskRequest], known: &[ImageRecord]) -> Result<Vec<Image>, OpenError> {
    let known = known.iter().map(|image| Some(image.identity())).chain(iter::repeat(None));
    let reopen = |(disk, known): (&DiskRequest, _)| Image::reopen(&disk.path, disk.readonly, known);
    wanted.iter().zip(known).map(reopen).collect()
}

/// Whether so many disks of these sizes can be told apart.
///
/// # Errors
/// In one line.
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
pub struct Shared {
    images: Vec<ImageRecord>,
    hashes: Hashes,
    digest_key: Arc<DigestKey>,
    readers: Vec<Reader>,
    pager: OnceLock<Weak<Pager>>,
    dma: Vec<DmaMode>,
    /// For the disks in strict DMA mode.
    iommu: OnceLock<Arc<SoftIommu>>,
    /// A front end has had memory pinned: from then on its rings stay put.
    used: Vec<AtomicBool>,
    /// Where each disk's front end has what it shares.
    places: Vec<Places>,
}

impl Shared {
    /// For these images, and a VM of so much memory.
    ///
    /// # Errors
    /// No random key is to be had, or as fstat(2).
    pub fn new(
        images: &[Image],
        wanted: &[DiskRequest],
        memory_bytes: u64,
    ) -> io::Result<Arc<Shared>> {
        let digest_key = Arc::new(DigestKey::random()?);
        // Of more blocks than it has frames a guest holds none.
        let room = if images.is_empty() { 0 } else { memory_bytes / FRAME_BYTES };
        let record = |image: &Image| {
            let Identity { device, inode } = image.identity()?;
            Ok(ImageRecord { device, inode })
        };
        Ok(Arc::new(Shared {
            images: images.iter().map(record).collect::<io::Result<_>>()?,
            hashes: Hashes::new(room, Arc::clone(&digest_key)),
            digest_key,
            readers: images.iter().map(Image::reader).collect(),
            pager: OnceLock::new(),
            dma: wanted.iter().map(|disk| disk.dma).collect(),
            iommu: OnceLock::new(),
            used: images.iter().map(|_| AtomicBool::new(false)).collect(),
            places: images.iter().map(|_| Places::default()).collect(),
        }))
    }

    /// Which images these are, for the record.
    pub fn images(&self) -> Vec<ImageRecord> {
        self.images.clone()
    }

    /// Who pins frames from now on.
    pub fn serve_with(&self, pager: &Arc<Pager>) {
        // There is one pager for a VM's life.
        let _ = self.pager.set(Arc::downgrade(pager));
    }

    /// Whether a disk is in strict DMA mode.
    pub fn is_strict(&self) -> bool {
        self.dma.contains(&DmaMode::Strict)
    }

    /// What is to be told of frames that come and go, for the sake of the disks.
    pub fn devices(&self, ram: &Arc<Ram>) -> Box<dyn IoMapping> {
        match self.is_strict() {
            true => Box::new(Arc::clone(self.iommu.get_or_init(|| Arc::new(SoftIommu::new(ram))))),
            false => Box::new(NoDevices),
        }
    }

    /// Whether every disk was used since it is served here.
    pub fn all_used(&self) -> bool {
        self.used.iter().all(|used| used.load(Acquire))
    }

    /// Whether one was.
    pub fn any_used(&self) -> bool {
        self.used.iter().any(|used| used.load(Acquire))
    }

    /// By which the blocks are known.
    pub fn digest_key(&self) -> Arc<DigestKey> {
        Arc::clone(&self.digest_key)
    }

    /// Takes frames out of this process's page table where disks have them mapped.
    pub fn forget(&self, frames: FrameRange) {
        self.places.iter().for_each(|places| places.forget(frames));
    }

    /// Blocks that are known by content.
    pub fn tracked_blocks(&self) -> u64 {
        self.hashes.used()
    }
}

/// The disks as the pager sees them.
pub struct Source(pub Arc<Shared>);

impl Disk for Source {
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

/// One disk's way to guest memory, and its eye on what moves.
struct Port {
    shared: Arc<Shared>,
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
        }?;
        self.shared.used[self.disk].store(true, Release);
        Ok(())
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

    /// As a device passed through: it asks nobody, and what is not mapped fails.
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

/// Has what a request uses in memory, and there it stays until [`unpin`].
///
/// # Errors
/// A frame that is not to be had, or not now ([`ebb_pager::DeviceAccess::pin_soon`]); nothing is
/// pinned then.
pub fn pin_waiting(pager: &Pager, segments: &[Segment], access: Access) -> Result<(), DmaFault> {
    let pieces: Vec<_> = segments.iter().flat_map(|segment| pieces(*segment, access)).collect();
    for (index, &(frames, replace)) in pieces.iter().enumerate() {
        if let Err(error) = pager.devices().pin_soon(frames, replace) {
            pieces[..index].iter().for_each(|(frames, _)| pager.devices().unpin(*frames));
            let gpa = frames.start.gpa();
            return Err(match error.kind() {
                io::ErrorKind::PermissionDenied => DmaFault::Forbidden(gpa),
                _ => DmaFault::NotNow(gpa),
            });
        }
    }
    Ok(())
}

/// Ends one [`pin_waiting`] of the same segments.
pub fn unpin(pager: &Pager, segments: &[Segment]) {
    segments.iter().for_each(|segment| pager.devices().unpin(frames_of(*segment)));
}

/// Before the VM is held, and when it is let go, no device of it does anything: it waits.
pub fn nobody_there(segments: &[Segment]) -> DmaFault {
    DmaFault::NotNow(segments.first().map(|segment| segment.gpa).unwrap_or_default())
}

impl Observer for Port {
    fn wants_content(&self) -> bool {
        true
    }

    fn before_overwrite(&self, blocks: Range<u64>) -> io::Result<()> {
        let blocks = self.global(blocks.start)..self.global(blocks.end);
        // First nothing finds them any more, then what rests there comes back.
        self.shared.hashes.forget(blocks.clone());
        match self.pager() {
            // Whoever holds a frame that rests there lets go of it some time.
            Some(pager) => {
                pager.devices().vacate_soon(blocks).map_err(|error| match error.kind() {
                    io::ErrorKind::TimedOut => io::ErrorKind::WouldBlock.into(),
                    _ => error,
                })
            }
            // Nobody can bring back what rests there: not yet, or not any more.
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn moved(&self, block: u64, _: Gfn, content: &Block, _: Direction) {
        self.shared.hashes.insert(self.global(block), content);
    }
}

/// The frames that a segment touches.
fn frames_of(segment: Segment) -> FrameRange {
    let first = segment.gpa.0 / FRAME_BYTES;
    let end = segment.gpa.0 + u64::from(segment.bytes);
    FrameRange::new(Gfn(first), end.div_ceil(FRAME_BYTES) - first)
}

/// A segment's frames; `true`: it covers them as a whole, and they are overwritten.
fn pieces(segment: Segment, access: Access) -> impl Iterator<Item = (FrameRange, bool)> {
    let (start, end) = (segment.gpa.0, segment.gpa.0 + u64::from(segment.bytes));
    let is_whole = move |gfn: Gfn| gfn.gpa().0 >= start && gfn.gpa().0 + FRAME_BYTES <= end;
    frames_of(segment)
        .frames()
        .map(move |gfn| (FrameRange::new(gfn, 1), access == Access::Replace && is_whole(gfn)))
}

/// Disks that are being served, at sockets in the VM's directory. Dropping this stops
/// them: QEMU then waits for the next daemon.
pub struct Disks {
    backends: Vec<Backend>,
    /// What they and the pager know of each other.
    pub shared: Arc<Shared>,
}

impl Disks {
    /// Begins to serve.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub fn start(
        images: Vec<Image>,
        shared: &Arc<Shared>,
        directory: &Path,
        cpus: u32,
    ) -> Result<Disks, ebb_block::StartError> {
        let options = Options { queues: queues(cpus), ..Options::default() };
        let start = |(disk, image)| {
            let port = Arc::new(Port { shared: Arc::clone(shared), disk });
            let socket = socket(directory, disk);
            let backend = Backend::start(&socket, image, port.clone(), port, options)?;
            // QEMU tries again where it came too early.
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
    /// As [`Shared::new`].
    pub fn none() -> io::Result<Disks> {
        Ok(Disks { backends: Vec::new(), shared: Shared::new(&[], &[], 0)? })
    }

    /// What all of them have done.
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

    /// How many there are.
    pub fn count(&self) -> usize {
        self.backends.len()
    }
}

/// A queue a processor, up to a few.
pub fn queues(cpus: u32) -> u16 {
    cpus.clamp(1, QUEUES_MAX) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_units::Gpa;

    #[test]
    fn an_image_that_was_exchanged_is_not_taken_up() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("image"), directory.path().join("other"));
        for path in [&path, &other] {
            std::fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
        }
        let wanted: Vec<DiskRequest> = vec![path.to_str().unwrap().parse().unwrap()];
        let images = open(&wanted).unwrap();
        let known = Shared::new(&images, &wanted, 64 << 20).unwrap().images();
        drop(images);
        // Of an older daemon there is no record.
        drop(reopen(&wanted, &[]).unwrap());
        drop(reopen(&wanted, &known).unwrap());
        std::fs::rename(other, &path).unwrap();
        let why = reopen(&wanted, &known).err().unwrap().to_string();
        assert!(why.contains("not the image") && !why.contains('\n'), "{why}");
    }

    #[test]
    fn only_frames_covered_as_a_whole_are_replaced() {
        let segment = Segment { gpa: Gpa(0x1800), bytes: 0x2000 };
        let all = |access| -> Vec<(u64, bool)> {
            pieces(segment, access).map(|(frames, replace)| (frames.start.0, replace)).collect()
        };
        assert_eq!(all(Access::Replace), [(1, false), (2, true), (3, false)]);
        assert_eq!(all(Access::Keep), [(1, false), (2, false), (3, false)]);
    }
}
