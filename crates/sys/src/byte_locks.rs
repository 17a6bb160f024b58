//! Locks of single bytes of a file, as QEMU keeps them on its disk images: those of an open file
//! description (fcntl_locking(2), `F_OFD_SETLK`). flock(2) and these locks do not see each other.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Takes a shared lock of the byte at `at`. The lock ends with the open file description.
///
/// # Errors
/// As fcntl(2). `EINVAL` or `ENOLCK`: the file system has no such locks.
pub fn share(file: &File, at: i64) -> io::Result<()> {
    set(file, one_byte(at, libc::F_RDLCK))
}

/// Gives the lock of the byte at `at` up.
///
/// # Errors
/// As fcntl(2).
pub fn release(file: &File, at: i64) -> io::Result<()> {
    set(file, one_byte(at, libc::F_UNLCK))
}

/// Whether anybody else has a lock of the byte at `at`.
///
/// # Errors
/// As fcntl(2).
pub fn is_locked_by_others(file: &File, at: i64) -> io::Result<bool> {
    let mut lock = one_byte(at, libc::F_WRLCK);
    // SAFETY: the descriptor is open, and fcntl(2) writes to `lock` only, which lives.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    match result < 0 {
        true => Err(io::Error::last_os_error()),
        false => Ok(lock.l_type != libc::F_UNLCK as i16),
    }
}

fn set(file: &File, lock: libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open, and fcntl(2) only reads `lock`.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn one_byte(at: i64, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: at,
        l_len: 1,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_open_of_the_file_sees_the_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        share(file.as_file(), 100).unwrap();
        let writer = File::options().read(true).write(true).open(file.path()).unwrap();
        assert!(is_locked_by_others(&writer, 100).unwrap());
        assert!(!is_locked_by_others(&writer, 101).unwrap());
        assert!(!is_locked_by_others(file.as_file(), 100).unwrap(), "it is its own");
        share(&writer, 100).unwrap();
        release(file.as_file(), 100).unwrap();
        assert!(is_locked_by_others(file.as_file(), 100).unwrap());
    }
}
