//! A guest's RAM as the file behind it: a memfd, on shmem or hugetlb.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use ebb_units::FRAME_BYTES;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, SeekFrom, fallocate, fcntl_add_seals, fcntl_get_seals,
    ftruncate, memfd_create, seek,
};

use crate::memory_fs::HUGETLBFS_MAGIC;

/// Number of cachestat(2), `include/uapi/asm-generic/unistd.h`.
const CACHESTAT: libc::c_long = 451;

/// A RAM file. Nothing that this type does allocates memory for a hole.
pub struct RamFile {
    file: File,
}

impl AsFd for RamFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<OwnedFd> for RamFile {
    fn from(fd: OwnedFd) -> RamFile {
        RamFile { file: File::from(fd) }
    }
}

impl RamFile {
    /// Makes a memfd of `bytes` bytes, all of it a hole. Nobody can change its size, or add a seal
    /// that would prevent punching.
    ///
    /// # Errors
    /// As memfd_create(2), ftruncate(2) and fcntl(2).
    pub fn create(name: &str, bytes: u64) -> io::Result<RamFile> {
        RamFile::create_with(name, bytes, MemfdFlags::CLOEXEC)
    }

    /// As [`RamFile::create`], on hugetlb pages of 2 MiB.
    ///
    /// # Errors
    /// As [`RamFile::create`].
    pub fn create_hugetlb(name: &str, bytes: u64) -> io::Result<RamFile> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        RamFile::create_with(name, bytes, flags)
    }

    fn create_with(name: &str, bytes: u64, flags: MemfdFlags) -> io::Result<RamFile> {
        let fd = memfd_create(name, flags | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(RamFile::from(fd))
    }

    /// Seals the file against shrinking, if it can be sealed. Returns whether it is sealed now.
    pub fn seal(&self) -> bool {
        keep_from_shrinking(&self.file)
    }

    /// Its size in bytes, holes included.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// The bytes of memory that the host spends on it.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn resident_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// Device and inode number, by which this file is found in another process's mappings.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = self.file.metadata()?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// Whether it is made of hugetlb pages. Its block size does not tell: a file of shared memory
    /// that may get huge pages has theirs, too.
    ///
    /// # Errors
    /// As fstatfs(2).
    pub fn is_hugetlb(&self) -> io::Result<bool> {
        Ok(rustix::fs::fstatfs(&self.file)?.f_type as u64 == HUGETLBFS_MAGIC)
    }

    /// How many bytes of a range are in memory, and not swapped out. `None`: the kernel does not
    /// tell (cachestat(2) came with Linux 6.5, and does not know hugetlb).
    ///
    /// # Errors
    /// As cachestat(2).
    pub fn cached_bytes(&self, offset: u64, bytes: u64) -> io::Result<Option<u64>> {
        let (range, mut found) = ([offset, bytes], [0_u64; 5]);
        // SAFETY: both are arrays of the sizes of the structures that the call reads and writes:
        // `struct cachestat_range`, and `struct cachestat`, whose first field counts pages.
        let done = unsafe {
            libc::syscall(CACHESTAT, self.file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0)
        };
        if done == 0 {
            return Ok(Some(found[0].saturating_mul(FRAME_BYTES).min(bytes)));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::EPERM) => Ok(None),
            _ => Err(error),
        }
    }

    /// Punches a range: returns its memory to the host. The range then reads as zero.
    ///
    /// # Errors
    /// As fallocate(2); `EPERM` for a sealed file.
    pub fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, offset, bytes)?)
    }

    /// Closes the file, and makes its descriptor refer to `other`, also for threads that use it
    /// meanwhile.
    ///
    /// # Errors
    /// As dup3(2). The descriptor then stays what it was.
    pub fn replace(&self, other: &RamFile) -> io::Result<()> {
        // SAFETY: both numbers are open descriptors of ours, which nobody closes meanwhile. The
        // number stays ours. A thread that uses it at this moment reaches one file or the other.
        let done =
            unsafe { libc::dup3(other.file.as_raw_fd(), self.file.as_raw_fd(), libc::O_CLOEXEC) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Reads into `to`. A hole reads as zeros and stays a hole.
    ///
    /// # Errors
    /// As pread(2). `UnexpectedEof`: beyond the file's end.
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(to, offset)
    }

    /// Offset of the first byte at or after `offset` that has memory. `None` if there is none.
    ///
    /// # Errors
    /// As lseek(2). hugetlb files do not know holes: all of such a file counts as data.
    pub fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        match seek(&self.file, SeekFrom::Data(offset)) {
            Ok(at) => Ok(Some(at)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Offset of the first byte at or after `offset` that has no memory.
    ///
    /// # Errors
    /// As lseek(2). `ENXIO`: beyond the file's end.
    pub fn next_hole(&self, offset: u64) -> io::Result<u64> {
        Ok(seek(&self.file, SeekFrom::Hole(offset))?)
    }

    /// Whether no part of the range has memory.
    ///
    /// # Errors
    /// As lseek(2).
    pub fn is_hole(&self, offset: u64, bytes: u64) -> io::Result<bool> {
        Ok(self.next_data(offset)?.is_none_or(|at| at >= offset.saturating_add(bytes)))
    }
}

/// Adds `F_SEAL_SHRINK` if that is missing and the file can be sealed. Returns whether the file has
/// it now. Only memfds can be sealed that were made with `MFD_ALLOW_SEALING` and are not sealed for
/// good.
pub fn keep_from_shrinking(file: impl AsFd) -> bool {
    let has = || fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    has() || fcntl_add_seals(&file, SealFlags::SHRINK).is_ok() && has()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_ram_file_cannot_change() {
        let file = RamFile::create("ram-test", 1 << 20).unwrap();
        for bytes in [4096, 2 << 20] {
            assert_eq!(ftruncate(&file, bytes), Err(rustix::io::Errno::PERM));
        }
        let write = SealFlags::FUTURE_WRITE;
        assert_eq!(fcntl_add_seals(&file, write), Err(rustix::io::Errno::PERM));
        file.punch(0, 1 << 20).unwrap();
        assert!(file.seal());
    }

    #[test]
    fn only_what_lets_itself_be_sealed_is() {
        let memfd = |flags| memfd_create("ram-test", flags).unwrap();
        let sealable = memfd(MemfdFlags::ALLOW_SEALING);
        ftruncate(&sealable, 8192).unwrap();
        assert!(keep_from_shrinking(&sealable));
        assert_eq!(ftruncate(&sealable, 4096), Err(rustix::io::Errno::PERM));
        assert!(!keep_from_shrinking(memfd(MemfdFlags::empty())));
        assert!(!keep_from_shrinking(tempfile::tempfile().unwrap()));
    }

    #[test]
    fn a_punched_range_is_a_hole_and_reads_as_zero() {
        let file = RamFile::create("ram-test", 1 << 20).unwrap();
        file.file.write_all_at(&[9; 16384], 4096).unwrap();
        assert_eq!(file.resident_bytes().unwrap(), 16384);
        assert_eq!(file.next_data(0).unwrap(), Some(4096));
        file.punch(4096, 8192).unwrap();
        assert!(file.is_hole(0, 12288).unwrap());
        let mut page = [1; 4096];
        file.read_at(4096, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        assert_eq!(file.resident_bytes().unwrap(), 8192);
    }
}
