//! Shared mappings of files that another process may change at any time.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use ebb_units::{FRAME_BYTES, Hva};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::bus_guard::BusGuard;
use crate::ram_file::RamFile;

/// An atomic integer. Implemented only for the types below.
trait Atomic {}
impl Atomic for AtomicU16 {}
impl Atomic for AtomicU32 {}
impl Atomic for AtomicU64 {}

/// A shared read-write mapping, accessible only as atomic words: another process may change the
/// same bytes, so no plain reference to them may exist.
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    /// Dropped before the memory is unmapped.
    guard: Option<BusGuard>,
}

// SAFETY: the mapping is shared memory that is accessed only through atomics and system calls. It
// is unmapped once, when it is dropped.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes of `file` from `offset` on, both page aligned. Core dumps do not contain
    /// it.
    ///
    /// # Errors
    /// As mmap(2) and madvise(2).
    pub fn new(file: impl AsFd, offset: u64, bytes: u64) -> io::Result<Mapping> {
        let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start =
            unsafe { mmap(std::ptr::null_mut(), length, prot, MapFlags::SHARED, file, offset)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::Other)?;
        let mapping = Mapping { start, bytes: length, guard: None };
        mapping.advise(0, bytes, Advice::LinuxDontDump)?;
        Ok(mapping)
    }

    /// Guards a mapping of a file that others may shrink, and whose content may be lost then: this
    /// process survives that, and [`Mapping::is_broken`] says so.
    ///
    /// # Errors
    /// As [`BusGuard::new`].
    pub fn guarded(mut self) -> io::Result<Mapping> {
        self.guard = Some(BusGuard::new(self.address(), self.bytes())?);
        Ok(self)
    }

    /// Whether it is guarded, as a mapping whose file others may shrink.
    pub fn is_guarded(&self) -> bool {
        self.guard.is_some()
    }

    /// Whether it shows zeros instead of its file, because the file was shrunk.
    pub fn is_broken(&self) -> bool {
        self.guard.as_ref().is_some_and(BusGuard::is_broken)
    }

    /// Its address in this process.
    pub fn address(&self) -> Hva {
        Hva(self.start.as_ptr() as u64)
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Returns `count` words of eight bytes from byte `offset` on. `None` if they are not all in
    /// the mapping, or not aligned to eight bytes.
    ///
    /// Loading a word of a hole allocates a page for it: ask only for words that are known to have
    /// memory.
    pub fn words(&self, offset: u64, count: usize) -> Option<&[AtomicU64]> {
        self.atomics(offset, count)
    }

    /// As [`Mapping::words`], with words of four bytes.
    pub fn half_words(&self, offset: u64, count: usize) -> Option<&[AtomicU32]> {
        self.atomics(offset, count)
    }

    /// As [`Mapping::words`], with words of two bytes.
    pub fn quarter_words(&self, offset: u64, count: usize) -> Option<&[AtomicU16]> {
        self.atomics(offset, count)
    }

    fn atomics<T: Atomic>(&self, offset: u64, count: usize) -> Option<&[T]> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(count.checked_mul(size_of::<T>())?)?;
        if end > self.bytes || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: `offset..end` lies in the mapping, which lives as long as `self`; it is aligned
        // for `T` (pages are, and `offset` is); `T` is an atomic integer, for which all bytes are
        // valid and whose bytes other processes may write at the same time.
        Some(unsafe {
            let first = self.start.as_ptr().add(offset).cast::<T>();
            std::slice::from_raw_parts(first, count)
        })
    }

    /// Gives every page of a range memory, and maps it here. New memory is zero; present content
    /// stays.
    ///
    /// # Errors
    /// As madvise(2) for `MADV_POPULATE_WRITE` (Linux 5.14). `ENOMEM` or `EFAULT`: the host has no
    /// memory to give.
    pub fn populate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.advise(offset, bytes, Advice::LinuxPopulateWrite)
    }

    /// As [`Mapping::populate`], for a file whose file system may be full: there a store to a page
    /// without a block would end this process by SIGBUS.
    ///
    /// # Errors
    /// `StorageFull`: the file system has no room, or the host no memory for it.
    pub fn reserve(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.populate(offset, bytes).map_err(|error| match Errno::from_io_error(&error) {
            // The kernel returns these where a store would raise SIGBUS.
            Some(Errno::FAULT | Errno::NOMEM) => Errno::NOSPC.into(),
            _ => error,
        })
    }

    /// Tells for each of `pages`, which begin at `offset`, whether it is in memory, mapped here or
    /// not.
    ///
    /// # Errors
    /// `InvalidInput`: they are not all in the mapping. Otherwise as mincore(2).
    pub fn in_memory(&self, offset: u64, pages: &mut [bool]) -> io::Result<()> {
        let bytes = pages.len() as u64 * FRAME_BYTES;
        self.check(offset, bytes)?;
        let mut found = vec![0_u8; pages.len()];
        // SAFETY: the range lies in the mapping (just checked), and `found` has a byte for each of
        // its pages; nothing else is written.
        let result = unsafe {
            let start = self.start.as_ptr().add(offset as usize);
            libc::mincore(start.cast(), bytes as usize, found.as_mut_ptr())
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        pages.iter_mut().zip(found).for_each(|(page, found)| *page = found & 1 == 1);
        Ok(())
    }

    /// Maps the memory of a range here. A page without memory gets some, which is zero.
    ///
    /// # Errors
    /// As madvise(2) for `MADV_POPULATE_READ` (Linux 5.14).
    pub fn map(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.advise(offset, bytes, Advice::LinuxPopulateRead)
    }

    /// Removes a range from this process's page table. The memory stays.
    ///
    /// # Errors
    /// As madvise(2).
    pub fn forget(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.advise(offset, bytes, Advice::LinuxDontNeed)
    }

    /// Maps all of another file in place of its own, at the same address.
    ///
    /// # Errors
    /// `InvalidInput`: that file is shorter. Otherwise as mmap(2) and madvise(2).
    pub fn replace(&self, other: &RamFile) -> io::Result<()> {
        if other.bytes()? < self.bytes() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (start, prot) = (self.start.as_ptr().cast(), ProtFlags::READ | ProtFlags::WRITE);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the call replaces exactly this mapping. Borrowed words of it become words of the
        // other file at once: still atomics that others may change at any time.
        unsafe { mmap(start, self.bytes, prot, flags, other, 0)? };
        self.advise(0, self.bytes(), Advice::LinuxDontDump)
    }

    /// Sets whether [`Mapping::populate`] may use huge pages.
    ///
    /// # Errors
    /// As madvise(2); `EINVAL` on a kernel without transparent huge pages.
    pub fn use_huge_pages(&self, yes: bool) -> io::Result<()> {
        let advice = if yes { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        self.advise(0, self.bytes(), advice)
    }

    /// Gives a range only small pages from now on. Large folios that it has stay.
    ///
    /// # Errors
    /// As madvise(2); `EINVAL` on a kernel without transparent huge pages.
    pub fn use_small_pages(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.advise(offset, bytes, Advice::LinuxNoHugepage)
    }

    /// Whether the range lies in the mapping.
    fn check(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match offset.checked_add(bytes).is_some_and(|end| end <= self.bytes()) {
            true => Ok(()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn advise(&self, offset: u64, bytes: u64, advice: Advice) -> io::Result<()> {
        self.check(offset, bytes)?;
        // SAFETY: the range lies in our own shared mapping (just checked); the
        // advice used here never changes what the file's pages hold.
        unsafe {
            let start = self.start.as_ptr().add(offset as usize);
            madvise(start.cast(), bytes as usize, advice)?;
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: this is the mapping made in `new`, and no borrow of it is left.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn words_stay_inside() {
        let file = RamFile::create("mapping-test", 8192).unwrap();
        let mapping = Mapping::new(&file, 0, 8192).unwrap();
        assert!(mapping.words(0, 1024).is_some());
        assert!(mapping.words(8, 1024).is_none());
        assert!(mapping.words(4, 1).is_none());
        assert!(mapping.words(u64::MAX - 7, 2).is_none());
        assert!(mapping.half_words(8188, 1).is_some());
        assert!(mapping.half_words(8190, 1).is_none());
        assert!(mapping.quarter_words(8190, 1).is_some());
        assert!(mapping.quarter_words(8190, 2).is_none());
    }

    #[test]
    fn a_core_dump_has_nothing_of_it() {
        let file = RamFile::create("mapping-test", 8192).unwrap();
        let mapping = Mapping::new(&file, 0, 8192).unwrap();
        let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:08x}-", mapping.address().0);
        let mut lines = all.lines().skip_while(|line| !line.starts_with(&start));
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn populating_keeps_what_is_there() {
        let file = RamFile::create("mapping-test", 16384).unwrap();
        let mapping = Mapping::new(&file, 0, 16384).unwrap();
        mapping.words(4096, 1).unwrap()[0].store(5, Relaxed);
        mapping.populate(0, 16384).unwrap();
        assert_eq!(file.resident_bytes().unwrap(), 16384);
        mapping.forget(0, 16384).unwrap();
        assert_eq!(mapping.words(4096, 1).unwrap()[0].load(Relaxed), 5);
    }
}
