//! A raw image: a file, or a block device.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ebb_sys::transfer::{AlignedBuffer, Memory, Operation, Transfer};
use ebb_units::{Bytes, FRAME_BYTES};
use rustix::fs::{FallocateFlags, FlockOperation, OFlags, SeekFrom, fallocate, flock, seek};
use rustix::io::Errno;
use thiserror::Error;

use crate::format::format_of;
use crate::observer::Block;
use crate::probe::{SmallSectors, probe};

/// Longest wait for the lock. A process that was killed holds its lock until the kernel has ended
/// its last I/O.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// Longest wait for the lock when a VM is recovered. A large flush to a slow disk takes longer
/// than [`LOCK_WAIT`], and without its disk the VM would stand still until the next daemon.
const SUCCESSOR_LOCK_WAIT: Duration = Duration::from_secs(60);
const LOCK_LOOK_EVERY: Duration = Duration::from_millis(10);
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

/// Why an image cannot be used.
#[derive(Debug, Error)]
#[error("{}: {why}", path.display())]
pub struct OpenError {
    /// The image's path.
    pub path: PathBuf,
    /// The reason.
    #[source]
    pub why: OpenErrorKind,
}

/// The reason why an image cannot be used.
#[derive(Debug, Error)]
pub enum OpenErrorKind {
    /// It cannot be opened or read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is a directory, a pipe or the like.
    #[error("is neither a file nor a block device")]
    Kind,
    /// It is 0 bytes long.
    #[error("is empty: give it its size first, as in `truncate --size 10G`")]
    Empty,
    /// Its size is no multiple of a block.
    #[error(
        "has {0} bytes, which is no multiple of 4096: extend it, as in `truncate --size %4096`"
    )]
    Size(u64),
    /// Another process has locked it.
    #[error("is in use by another process, maybe another ebbd")]
    InUse,
    /// It is made for smaller sectors.
    #[error("{0}")]
    SmallSectors(#[from] SmallSectors),
    /// It is not raw.
    #[error(
        "begins as a {0} image, and only raw images are served: convert it with \
         `qemu-img convert -O raw`, or write `,format=raw` behind it if these are a disk's first bytes"
    )]
    Format(&'static str),
    /// Its name now belongs to another image.
    #[error(
        "is not the image that the guest had before: put that one back, and it is taken up by itself"
    )]
    Exchanged,
}

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

/// Returns the range of whole blocks in `bytes`, in bytes.
fn inner(bytes: &Range<u64>) -> Range<u64> {
    let start = bytes.start.next_multiple_of(FRAME_BYTES);
    start..(bytes.end / FRAME_BYTES * FRAME_BYTES).max(start)
}

/// Returns the range of blocks that `bytes` touch, in bytes.
pub(crate) fn outer(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / FRAME_BYTES * FRAME_BYTES..bytes.end.next_multiple_of(FRAME_BYTES)
}

fn move_own(
    file: &Arc<File>,
    operation: Operation,
    offset: u64,
    buffer: AlignedBuffer,
    bytes: u64,
) -> io::Result<AlignedBuffer> {
    let transfer = Transfer::own(file.clone(), operation, offset, buffer, bytes as usize)?;
    match transfer.run() {
        (Ok(()), Memory::Own(buffer)) => Ok(buffer),
        (Err(error), _) => Err(error),
        _ => Err(io::ErrorKind::InvalidInput.into()),
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

/// Opens without direct I/O where that is refused, as by tmpfs of old kernels.
fn open_direct(
    path: &Path,
    readonly: bool,
    flags: OFlags,
    direct: bool,
) -> io::Result<(File, bool)> {
    if direct {
        match open_file(path, readonly, flags | OFlags::DIRECT) {
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
            result => return result.map(|file| (file, true)),
        }
    }
    open_file(path, readonly, flags).map(|file| (file, false))
}

fn open_file(path: &Path, readonly: bool, flags: OFlags) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(!readonly).custom_flags(flags.bits() as i32).open(path)
}

fn lock(file: &File, readonly: bool, wait: Duration) -> Result<(), OpenErrorKind> {
    let operation = match readonly {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    let end = Instant::now() + wait;
    loop {
        match flock(file, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < end => thread::sleep(LOCK_LOOK_EVERY),
            Err(Errno::WOULDBLOCK) => return Err(OpenErrorKind::InUse),
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}

fn reads_first_block(file: &File) -> bool {
    let Ok(file) = file.try_clone().map(Arc::new) else { return false };
    let buffer = AlignedBuffer::new(FRAME_BYTES as usize);
    match move_own(&file, Operation::Read, 0, buffer, FRAME_BYTES) {
        Err(error) => error.raw_os_error() != Some(Errno::INVAL.raw_os_error()),
        Ok(_) => true,
    }
}

/// Reads any bytes by reading whole blocks.
fn read_at(file: &Arc<File>, offset: u64, into: &mut [u8]) -> io::Result<()> {
    let end = offset.checked_add(into.len() as u64).filter(|&end| end < i64::MAX as u64 / 2);
    let blocks = outer(&(offset..end.ok_or(io::ErrorKind::UnexpectedEof)?));
    let count = blocks.end - blocks.start;
    let buffer = AlignedBuffer::new(count as usize);
    let buffer = move_own(file, Operation::Read, blocks.start, buffer, count)?;
    let from = (offset - blocks.start) as usize;
    let part = buffer.get(from..from + into.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
    into.copy_from_slice(part);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn image_of(bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all_at(bytes, 0).unwrap();
        file
    }

    fn why(path: &Path) -> String {
        Image::open(path, false).err().expect("it is refused").to_string()
    }

    #[test]
    fn what_cannot_be_used_is_refused_in_one_line() {
        let odd = image_of(&[1; 5000]);
        assert!(why(odd.path()).contains("5000 bytes"), "{}", why(odd.path()));
        assert!(why(image_of(&[]).path()).contains("empty"));
        assert!(why(Path::new("/dev/null")).contains("neither"));
        assert!(why(Path::new("/no/such")).contains("/no/such: "));
        let mut xfs = vec![0; 8192];
        xfs[..4].copy_from_slice(b"XFSB");
        xfs[102] = 2;
        let why = why(image_of(&xfs).path());
        assert!(why.contains("sectors of 512") && !why.contains('\n'), "{why}");
    }

    #[test]
    fn another_format_is_served_as_raw_only_by_word() {
        let mut qcow2 = vec![0; 8192];
        qcow2[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        let file = image_of(&qcow2);
        let why = why(file.path());
        assert!(why.contains("qcow2") && why.contains("format=raw"), "{why}");
        drop(Image::open_raw(file.path(), false).unwrap());
        // The format is found even if the size is one that no raw image has.
        file.as_file().set_len(8192 + 512).unwrap();
        assert!(self::why(file.path()).contains("qcow2"));
    }

    #[test]
    fn what_a_guest_has_written_does_not_close_its_disk() {
        let file = image_of(&[0; 8192]);
        let image = Image::open(file.path(), false).unwrap();
        let identity = image.identity().unwrap();
        drop(image);
        file.as_file().write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
        file.as_file().write_all_at(b"EFI PART", 512).unwrap();
        drop(Image::reopen(file.path(), false, Some(identity)).unwrap());
        let other = image_of(&[0; 8192]);
        let error = Image::reopen(other.path(), false, Some(identity)).err().unwrap();
        assert!(matches!(error.why, OpenErrorKind::Exchanged), "{error}");
        Image::reopen(other.path(), false, None).unwrap();
    }

    #[test]
    fn readers_share_an_image_and_a_writer_does_not() {
        let file = image_of(&[0; 4096]);
        let one = Image::open(file.path(), true).unwrap();
        let _two = Image::open(file.path(), true).unwrap();
        assert!(one.is_readonly());
        assert!(why(file.path()).contains("in use"));
    }

    #[test]
    fn zeroing_touches_nothing_beside() {
        for direct in [true, false] {
            for unmap in [true, false] {
                let file = image_of(&[7; 5 * 4096]);
                let image = Image::open_with(file.path(), false, direct).unwrap();
                for part in [100..612, 4096 + 512..3 * 4096 + 1024, 5 * 4096 - 512..5 * 4096] {
                    image.zero(part, unmap).unwrap();
                }
                let mut read = vec![0; 5 * 4096];
                file.as_file().read_exact_at(&mut read, 0).unwrap();
                let zeros: Vec<usize> = (0..read.len()).filter(|&at| read[at] == 0).collect();
                let expected: Vec<usize> =
                    (100..612).chain(4608..13312).chain(19968..20480).collect();
                assert!(zeros == expected, "direct {direct} unmap {unmap}");
            }
        }
    }

    #[test]
    fn only_whole_blocks_are_discarded() {
        let file = image_of(&[7; 4 * 4096]);
        let image = Image::open(file.path(), false).unwrap();
        image.discard(4000..2 * 4096 + 10).unwrap();
        image.discard(3 * 4096 + 1..4 * 4096).unwrap();
        let mut read = vec![0; 4 * 4096];
        file.as_file().read_exact_at(&mut read, 0).unwrap();
        assert!(read[..4096].iter().chain(&read[2 * 4096..]).all(|&byte| byte == 7));
    }

    #[test]
    fn a_shrunk_file_is_noticed() {
        let file = image_of(&[7; 2 * 4096]);
        let image = Image::open(file.path(), false).unwrap();
        image.check_end(8192).unwrap();
        file.as_file().set_len(4096).unwrap();
        image.check_end(4096).unwrap();
        assert!(image.check_end(8192).is_err());
    }
}
