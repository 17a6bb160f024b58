//! The file of an image, as it is opened and locked.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::error::OpenErrorKind;

const LOCK_LOOK_EVERY: Duration = Duration::from_millis(10);

/// Opens without direct I/O where that is refused, as by tmpfs of old kernels.
pub(super) fn open_direct(
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

pub(super) fn open_file(path: &Path, readonly: bool, flags: OFlags) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(!readonly).custom_flags(flags.bits() as i32).open(path)
}

pub(super) fn lock(file: &File, readonly: bool, wait: Duration) -> Result<(), OpenErrorKind> {
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
