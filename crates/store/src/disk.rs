//! The file or block device under a swap file.

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock, fstatvfs};
use rustix::io::Errno;

use crate::{Identity, Medium, Space, StoreError, signature};

/// Bytes that are never written at a device's start and end, where formats have their magic
/// bytes. So nothing that a guest wrote is ever taken for a format.
const MARGIN_BYTES: u64 = 1 << 20;
const _: () = assert!(MARGIN_BYTES >= signature::HEAD_BYTES as u64);

/// A sparse file or a block device that belongs to one VM.
pub struct Disk {
    file: File,
    /// Where it was opened.
    path: PathBuf,
    direct: bool,
    /// The offset of slot 0 in bytes.
    first_byte: u64,
}

impl Disk {
    /// Opens a block device, or opens or makes a file, with room for `bytes`. It uses direct I/O
    /// where the file system supports that.
    ///
    /// # Errors
    /// As open(2) and ftruncate(2). [`StoreError::Unusable`]: another process uses it, or the
    /// device contains something, or is too small.
    pub fn open(path: &Path, bytes: u64) -> Result<Disk, StoreError> {
        let disk = Disk::open_any(path, bytes, true)?;
        disk.make_room(bytes)?;
        Ok(disk)
    }

    /// Opens a block device or a file that was made for `bytes` and has content. It makes none and
    /// changes none: [`Disk::make_room`] is for later.
    ///
    /// # Errors
    /// Those of [`Disk::open`]. [`StoreError::Gone`]: it is not there, or shorter, as a copy is
    /// that is not done.
    pub(crate) fn open_again(path: &Path, bytes: u64) -> Result<Disk, StoreError> {
        let shown = path.display();
        let disk = Disk::open_any(path, bytes, false).map_err(|error| match error {
            StoreError::Medium(error) if is_missing(&error) => {
                StoreError::Gone(format!("there is no {shown}"))
            }
            error => error,
        })?;
        let found = disk.file.metadata()?;
        match found.is_file() && found.len() < bytes {
            true => Err(StoreError::Gone(format!("{shown} is another file, or not whole"))),
            false => Ok(disk),
        }
    }

    fn open_any(path: &Path, bytes: u64, make: bool) -> Result<Disk, StoreError> {
        let device = path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
        let opened = match device {
            true => Disk::open_device(path, bytes),
            false => Disk::open_file(path, make),
        };
        opened.map_err(|error| match error {
            StoreError::Medium(error) => {
                let why = format!("{}: {error}", path.display());
                StoreError::Medium(io::Error::new(error.kind(), why))
            }
            error => error,
        })
    }

    fn open_file(path: &Path, make: bool) -> Result<Disk, StoreError> {
        let mut options = File::options();
        // Its content is the guest's: only root may read it.
        options.read(true).write(true).create(make).truncate(false).mode(0o600);
        let (file, direct) = open_direct(&mut options, path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
            Errno::WOULDBLOCK => unusable(path, "in use by another Ebb"),
            error => error.into(),
        })?;
        Ok(Disk { file, path: path.into(), direct, first_byte: 0 })
    }

    /// Makes a file private and as large as it must be. A device stays as it is.
    ///
    /// # Errors
    /// As fchmod(2) and ftruncate(2).
    pub(crate) fn make_room(&self, bytes: u64) -> Result<(), StoreError> {
        let made = match self.file.metadata()?.is_file() {
            true => self
                .file
                .set_permissions(Permissions::from_mode(0o600))
                .and_then(|()| self.file.set_len(bytes)),
            false => Ok(()),
        };
        made.map_err(|error| {
            let why = format!("{}: {error}", self.path.display());
            StoreError::Medium(io::Error::new(error.kind(), why))
        })
    }

    fn open_device(path: &Path, bytes: u64) -> Result<Disk, StoreError> {
        let flags = OFlags::DIRECT | OFlags::EXCL;
        let mut options = File::options();
        options.read(true).write(true).custom_flags(flags.bits() as i32);
        // O_EXCL of a device fails if it is mounted, a swap space or part of a RAID.
        let mut file = options.open(path).map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => {
                unusable(path, "in use, by a mount, a swap space or another Ebb")
            }
            _ => error.into(),
        })?;
        let device_bytes = file.seek(SeekFrom::End(0))?;
        let needed = bytes.saturating_add(2 * MARGIN_BYTES);
        if device_bytes < needed {
            let why = format!("has {device_bytes} bytes, {needed} are needed");
            return Err(unusable(path, &why));
        }
        let whole = Disk { file, path: path.into(), direct: true, first_byte: 0 };
        if let Some(what) = signature::find(signature::head(&whole)?.pages().as_flattened()) {
            let shown = path.display();
            let why = format!("holds {what}; if it is not needed: wipefs --all {shown}");
            return Err(unusable(path, &why));
        }
        Ok(Disk { first_byte: MARGIN_BYTES, ..whole })
    }
}

fn identity(found: &Metadata) -> Option<Identity> {
    let made = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let made = made.map_or(0, |made| made.as_nanos() as u64);
    found.is_file().then(|| [found.dev(), found.ino(), made])
}

/// Whether nothing has the name.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn unusable(path: &Path, why: &str) -> StoreError {
    StoreError::Unusable(format!("{}: {why}", path.display()))
}

/// Opens a file, with direct I/O if possible. The flag says whether it is.
fn open_direct(options: &mut OpenOptions, path: &Path) -> io::Result<(File, bool)> {
    match options.custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Ok((options.custom_flags(0).open(path)?, false))
        }
        result => Ok((result?, true)),
    }
}

impl Medium for Disk {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(bytes, self.first_byte + offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_at(bytes, self.first_byte + offset)
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, hole, self.first_byte + offset, bytes) {
            // The file does not shrink then, or the device keeps its blocks.
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => Ok(result?),
        }
    }

    fn space(&self) -> io::Result<Option<Space>> {
        let found = self.file.metadata()?;
        if !found.is_file() {
            return Ok(None);
        }
        let system = fstatvfs(&self.file)?;
        Ok(Some(Space {
            taken_bytes: found.blocks().saturating_mul(512),
            free_bytes: system.f_bavail.saturating_mul(system.f_frsize),
            total_bytes: system.f_blocks.saturating_mul(system.f_frsize),
        }))
    }

    fn identity(&self) -> io::Result<Option<Identity>> {
        Ok(identity(&self.file.metadata()?))
    }

    fn is_removed(&self) -> bool {
        let Ok(own) = self.file.metadata() else { return false };
        let is = |found: &Metadata| match identity(&own) {
            None => found.rdev() == own.rdev(),
            file => identity(found) == file,
        };
        self.path.metadata().map_or_else(|error| is_missing(&error), |found| !is(&found))
    }

    fn is_direct(&self) -> bool {
        self.direct
    }
}
