//! The disks that `ebb run --disk` gives a VM. Ebb serves them, so that frames equal to a block can
//! be disk-backed by it, and no frame that a request uses is evicted.

use std::io;
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_api::{DiskCounts, DiskFormat, DiskRequest, DmaMode, VmName};
use ebb_block::{Backend, Image, OpenError, Options, StartError};
use ebb_served::{Port, SharedDisks};
use ebb_vm::handed;

use crate::model::served::ImageRecord;
use crate::support::failpoint;
use crate::system::last_words;

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

/// Returns what the pager and the disks of these images know of each other, for a VM with this much
/// memory.
///
/// # Errors
/// Those of [`SharedDisks::new`].
pub fn share(
    images: &[Image],
    wanted: &[DiskRequest],
    memory_bytes: u64,
) -> io::Result<Arc<SharedDisks>> {
    let are_strict = wanted.iter().map(|disk| disk.dma == DmaMode::Strict);
    SharedDisks::new(images, are_strict, memory_bytes)
}

/// Returns the images as they are put on record.
pub fn on_record(shared: &SharedDisks) -> Vec<ImageRecord> {
    shared.identities().map(ImageRecord::of).collect()
}

/// Disks that are being served, at sockets in the VM's directory. Dropping this stops them: QEMU
/// then waits for the next daemon.
pub struct Disks {
    backends: Vec<Backend>,
    /// What the disks and the pager know of each other.
    pub shared: Arc<SharedDisks>,
}

impl Disks {
    /// Begins to serve the images of the VM `name`. This process ends if a thread that serves one
    /// panics: the guest would wait for its disk.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub fn start(
        images: Vec<Image>,
        shared: &Arc<SharedDisks>,
        (name, directory): (&VmName, &Path),
        cpus: u32,
    ) -> Result<Disks, StartError> {
        let options = Options { queues: queues(cpus), ..Options::default() };
        let start = |(index, (image, port)): (usize, (Image, Arc<Port>))| {
            let (socket, path) = (socket(directory, index), image.path().to_owned());
            let observer = failpoint::observer(port.clone(), name);
            let backend = Backend::start(&socket, image, port, observer, options)?;
            let directory = directory.to_owned();
            backend.on_panic(move |why| {
                let why = format!("its disk {}: {why}", path.display());
                last_words::end_process(&directory, &why)
            });
            // If QEMU connected too early, it tries again.
            handed::admit(&socket).map_err(StartError::Host)?;
            Ok(backend)
        };
        let backends = images.into_iter().zip(Port::each(shared)).enumerate().map(start);
        let backends = backends.collect::<Result<_, StartError>>()?;
        Ok(Disks { backends, shared: Arc::clone(shared) })
    }

    /// For a VM none of whose disks Ebb serves.
    ///
    /// # Errors
    /// Those of [`SharedDisks::new`].
    pub fn none() -> io::Result<Disks> {
        Ok(Disks { backends: Vec::new(), shared: share(&[], &[], 0)? })
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
        let known = on_record(&share(&images, &wanted, 64 << 20).unwrap());
        drop(images);
        // An older daemon left no record of images.
        drop(reopen(&wanted, &[]).unwrap());
        drop(reopen(&wanted, &known).unwrap());
        std::fs::rename(other, &path).unwrap();
        let why = reopen(&wanted, &known).err().unwrap().to_string();
        assert!(why.contains("not the image") && !why.contains('\n'), "{why}");
    }
}
