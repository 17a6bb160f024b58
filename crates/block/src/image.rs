//! A raw image: a file, or a block device.

mod blocks;
mod error;
mod file;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebb_sys::transfer::{AlignedBuffer, Operation};
use ebb_units::{Bytes, FRAME_BYTES};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

use crate::format::format_of;
use crate::observer::Block;
use crate::probe::probe;
pub(crate) use blocks::outer;
use blocks::{inner, move_own, read_at, reads_first_block};
pub use error::{OpenError, OpenErrorKind};
use file::{lock, open_direct, open_file};

/// Longest wait for the lock. A process that was killed holds its lock until the kernel has ended
/// its last I/O.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// Longest wait for the lock when a VM is recovered. A large flush to a slow disk takes longer
/// than [`LOCK_WAIT`], and without its disk the VM would stand still until the next daemon.
const SUCCESSOR_LOCK_WAIT: Duration = Duration::from_secs(60);
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

/// Tells an image from another that later gets its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The file system's device number, or the block device's own.
    pub device: u64,
    /// The file's inode number; 0 for a block device.
    pub inode: u64,
}

/// How an image is opened.
struct Opening {
    readonly: bool,
    direct: bool,
    wait: Duration,
    /// Whether to check by its content that it can be used.
    looks: bool,
    /// Which image it must be.
    wanted: Option<Identity>,
}

/// An open image with a lock: exclusive if it may be written, shared if it is only read.
pub struct Image {
    path: PathBuf,
    /// The lock is on this file, and all I/O goes through it. An I/O that outlives this process
    /// keeps the lock until it has ended, so no successor comes too early.
    file: Arc<File>,
    bytes: u64,
    readonly: bool,
    is_direct: bool,
    is_file: bool,
}

/// Reads an image's blocks. It keeps the file open and locked.
#[derive(Clone)]
pub struct Reader {
    file: Arc<File>,
    blocks: u64,
}

impl Reader {
    /// Returns the number of blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Reads blocks in a row, from block `first` on.
    ///
    /// # Errors
    /// As pread(2). `UnexpectedEof`: the blocks are beyond the end, or the image was shrunk.
    pub fn read(&self, first: u64, to: &mut [Block]) -> io::Result<()> {
        let bytes = to.as_flattened_mut();
        let offset = first.saturating_mul(FRAME_BYTES);
        // Direct I/O reads into aligned memory only.
        if bytes.as_ptr().addr().is_multiple_of(FRAME_BYTES as usize) {
            return self.file.read_exact_at(bytes, offset);
        }
        let count = bytes.len() as u64;
        let buffer = AlignedBuffer::new(bytes.len());
        let buffer = move_own(&self.file, Operation::Read, offset, buffer, count)?;
        bytes.copy_from_slice(buffer.get(..bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Image {
    /// Opens, locks and checks an image. Its I/O bypasses the page cache where the file system
    /// supports that.
    ///
    /// # Errors
    /// It cannot be used; one line says why and what to do.
    pub fn open(path: &Path, readonly: bool) -> Result<Image, OpenError> {
        Image::open_with(path, readonly, true)
    }

    /// Opens an image that the user calls raw, whatever it contains.
    ///
    /// # Errors
    /// It cannot be used; one line says why and what to do.
    pub fn open_raw(path: &Path, readonly: bool) -> Result<Image, OpenError> {
        open(path, &Opening { readonly, direct: true, wait: LOCK_WAIT, looks: false, wanted: None })
    }

    /// Opens an image again after the death of a process that served it. It waits longer for the
    /// I/O that the kernel still does for that process. It does not check the content, which the
    /// guest may have changed, but that this is the image `wanted`, if that is given.
    ///
    /// # Errors
    /// It cannot be used; one line says why and what to do.
    pub fn reopen(
        path: &Path,
        readonly: bool,
        wanted: Option<Identity>,
    ) -> Result<Image, OpenError> {
        let wait = SUCCESSOR_LOCK_WAIT;
        open(path, &Opening { readonly, direct: true, wait, looks: false, wanted })
    }

    /// Opens an image as [`Image::open`] does, through the page cache unless `direct`.
    ///
    /// # Errors
    /// It cannot be used; one line says why and what to do.
    pub fn open_with(path: &Path, readonly: bool, direct: bool) -> Result<Image, OpenError> {
        open(path, &Opening { readonly, direct, wait: LOCK_WAIT, looks: true, wanted: None })
    }

    /// Returns what tells this image from others.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn identity(&self) -> io::Result<Identity> {
        identity(&self.file)
    }

    /// Returns the image's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns its size in bytes when it was opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is opened for reading only.
    pub fn is_readonly(&self) -> bool {
        self.readonly
    }

    /// Whether I/O bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Returns a reader for use beside the device that serves the image.
    pub fn reader(&self) -> Reader {
        Reader { file: self.file.clone(), blocks: self.bytes / FRAME_BYTES }
    }

    pub(crate) fn file(&self) -> Arc<File> {
        self.file.clone()
    }

    /// Fails if a file has been shrunk below `end`, since a write would extend it again.
    pub(crate) fn check_end(&self, end: u64) -> io::Result<()> {
        match !self.is_file || self.file.metadata()?.len() >= end {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Makes these bytes read as zero. With `unmap`, it frees their space if the file can.
    pub(crate) fn zero(&self, bytes: Range<u64>, unmap: bool) -> io::Result<()> {
        let whole = inner(&bytes);
        if whole.is_empty() {
            return self.zero_parts(bytes);
        }
        self.zero_parts(bytes.start..whole.start)?;
        self.zero_parts(whole.end..bytes.end)?;
        let modes: &[FallocateFlags] = match unmap {
            true => &[FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE],
            false => &[FallocateFlags::ZERO_RANGE],
        };
        for &mode in modes {
            match self.allocate(mode, &whole) {
                Err(Errno::OPNOTSUPP) => {}
                result => return Ok(result?),
            }
        }
        self.write_zeros(whole)
    }

    /// Discards the blocks that lie wholly in these bytes.
    pub(crate) fn discard(&self, bytes: Range<u64>) -> io::Result<()> {
        let whole = inner(&bytes);
        if whole.is_empty() {
            return Ok(());
        }
        match self.allocate(FallocateFlags::PUNCH_HOLE, &whole) {
            // A discard is a hint.
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => Ok(result?),
        }
    }

    fn allocate(&self, mode: FallocateFlags, bytes: &Range<u64>) -> rustix::io::Result<()> {
        let mode = mode | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, mode, bytes.start, bytes.end - bytes.start)
    }

    fn write_zeros(&self, bytes: Range<u64>) -> io::Result<()> {
        let chunk_bytes = ZERO_CHUNK_BYTES.min(bytes.end - bytes.start);
        let mut buffer = AlignedBuffer::new(chunk_bytes as usize);
        for at in bytes.clone().step_by(chunk_bytes as usize) {
            let count = chunk_bytes.min(bytes.end - at);
            let operation = Operation::Write { durable: false };
            buffer = move_own(&self.file, operation, at, buffer, count)?;
        }
        Ok(())
    }

    /// Zeroes bytes within a few blocks, which it reads and writes as a whole.
    fn zero_parts(&self, bytes: Range<u64>) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let blocks = outer(&bytes);
        let count = blocks.end - blocks.start;
        let buffer = AlignedBuffer::new(count as usize);
        let mut buffer = move_own(&self.file, Operation::Read, blocks.start, buffer, count)?;
        let part = (bytes.start - blocks.start) as usize..(bytes.end - blocks.start) as usize;
        buffer.get_mut(part).ok_or(io::ErrorKind::InvalidInput)?.fill(0);
        let operation = Operation::Write { durable: false };
        move_own(&self.file, operation, blocks.start, buffer, count).map(drop)
    }

    /// Returns once all that was written is on the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

fn open(path: &Path, opening: &Opening) -> Result<Image, OpenError> {
    open_as(path, opening).map_err(|why| OpenError { path: path.into(), why })
}

fn open_as(path: &Path, opening: &Opening) -> Result<Image, OpenErrorKind> {
    let &Opening { readonly, direct, wait, .. } = opening;
    // Check before the open: opening a pipe would wait for its other end.
    let kind = std::fs::metadata(path)?.file_type();
    let (is_file, is_device) = (kind.is_file(), kind.is_block_device());
    if !is_file && !is_device {
        return Err(OpenErrorKind::Kind);
    }
    // A device that is mounted or otherwise in use must not be written.
    let exclusive = if is_device && !readonly { OFlags::EXCL } else { OFlags::empty() };
    let (file, is_direct) = open_direct(path, readonly, exclusive, direct)?;
    lock(&file, readonly, wait)?;
    // Some disks do no direct I/O in units of 4 KiB.
    let usable = !is_direct || reads_first_block(&file);
    let (file, is_direct) = match usable {
        true => (file, is_direct),
        false => {
            drop(file);
            let file = open_file(path, readonly, exclusive)?;
            lock(&file, readonly, wait)?;
            (file, false)
        }
    };
    let file = Arc::new(file);
    let bytes = check(&file, opening)?;
    tracing::debug!("{}: {}, direct: {is_direct}", path.display(), Bytes(bytes));
    Ok(Image { path: path.into(), file, bytes, readonly, is_direct, is_file })
}

/// Checks that it is the wanted image and can be used, and returns its size in bytes.
fn check(file: &Arc<File>, opening: &Opening) -> Result<u64, OpenErrorKind> {
    if opening.wanted.is_some_and(|wanted| identity(file).ok() != Some(wanted)) {
        return Err(OpenErrorKind::Exchanged);
    }
    let read_at = |offset, into: &mut [u8]| read_at(file, offset, into);
    if let Some(format) = opening.looks.then(|| format_of(&read_at)).flatten() {
        return Err(OpenErrorKind::Format(format));
    }
    let bytes = seek(file, SeekFrom::End(0)).map_err(io::Error::from)?;
    match bytes {
        0 => return Err(OpenErrorKind::Empty),
        bytes if !bytes.is_multiple_of(FRAME_BYTES) => return Err(OpenErrorKind::Size(bytes)),
        _ => {}
    }
    if opening.looks {
        probe(&read_at, bytes)?;
    }
    Ok(bytes)
}

fn identity(file: &File) -> io::Result<Identity> {
    let metadata = file.metadata()?;
    Ok(match metadata.file_type().is_block_device() {
        true => Identity { device: metadata.rdev(), inode: 0 },
        false => Identity { device: metadata.dev(), inode: metadata.ino() },
    })
}
