//! A swap file's file, or a block device.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock};
use rustix::io::Errno;

use crate::{Medium, StoreError};

/// A sparse file of one VM's own.
pub struct Disk {
    file: File,
    direct: bool,
}

impl Disk {
    /// Opens the file, or makes it, with room for `bytes`; direct I/O where the
    /// file system takes it.
    ///
    /// # Errors
    /// As open(2) and ftruncate(2); [`StoreError::Unusable`]: somebody else uses it.
    pub fn open(path: &Path, bytes: u64) -> Result<Disk, StoreError> {
        let mut options = File::options();
        // What it holds is the guest's: for root's eyes only.
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let (file, direct) = open_direct(&mut options, path)?;
        let busy = || StoreError::Unusable(format!("{}: in use by another Ebb", path.display()));
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
            Errno::WOULDBLOCK => busy(),
            error => error.into(),
        })?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.set_len(bytes)?;
        Ok(Disk { file, direct })
    }
}

/// Whether direct I/O was taken, too.
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
        self.file.read_at(bytes, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_at(bytes, offset)
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, hole, offset, bytes) {
            // It stays as large as it is.
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => Ok(result?),
        }
    }

    fn is_direct(&self) -> bool {
        self.direct
    }
}
