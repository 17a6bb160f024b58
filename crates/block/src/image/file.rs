//! The file of an image, as it is opened and locked.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ebb_sys::byte_locks;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::error::OpenErrorKind;

/// Byte from which on each byte is locked for something that is done with the image (QEMU,
/// `block/file-posix.c`, `RAW_LOCK_PERM_BASE`).
const USES: i64 = 100;
/// Byte from which on each byte is locked for something that others may not do
/// (`RAW_LOCK_SHARED_BASE`).
const BARS: i64 = 200;
/// Reads of consistent data.
const READ: i64 = 0;
/// Writes.
const WRITE: i64 = 1;
/// Changes of the size.
const RESIZE: i64 = 3;
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
        let is_locked = match flock(file, operation) {
            Ok(()) => qemu_locks(file, readonly)?,
            Err(Errno::WOULDBLOCK) => false,
            Err(error) => return Err(io::Error::from(error).into()),
        };
        match is_locked {
            true => return Ok(()),
            false if Instant::now() < end => thread::sleep(LOCK_LOOK_EVERY),
            false => return Err(OpenErrorKind::InUse),
        }
    }
}

/// Takes the locks that a QEMU with this image would take, so that no QEMU writes to it meanwhile.
/// Returns whether no QEMU's are in the way. A file system without such locks has none of QEMU's
/// either.
fn qemu_locks(file: &File, readonly: bool) -> io::Result<bool> {
    let own: &[i64] = match readonly {
        true => &[USES + READ, BARS + WRITE, BARS + RESIZE],
        false => &[USES + READ, USES + WRITE, BARS + WRITE, BARS + RESIZE],
    };
    // What others may not do, and what others bar.
    let in_the_way: &[i64] = match readonly {
        true => &[USES + WRITE, USES + RESIZE, BARS + READ],
        false => &[USES + WRITE, USES + RESIZE, BARS + READ, BARS + WRITE],
    };
    let result = (|| {
        own.iter().try_for_each(|&at| byte_locks::share(file, at))?;
        let mut free = true;
        for &at in in_the_way {
            free &= !byte_locks::is_locked_by_others(file, at)?;
        }
        Ok(free)
    })();
    match result {
        Ok(true) => Ok(true),
        Ok(false) => {
            own.iter().try_for_each(|&at| byte_locks::release(file, at))?;
            Ok(false)
        }
        Err(error) if has_no_byte_locks(&error) => Ok(true),
        Err(error) => Err(error),
    }
}

fn has_no_byte_locks(error: &io::Error) -> bool {
    let without = [Errno::INVAL, Errno::NOLCK, Errno::NOTSUP, Errno::NOSYS];
    without.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}
