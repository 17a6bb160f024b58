//! A file of RAM, mapped in this process.

use std::io;

use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;

/// One file of RAM, and Ebb's own mapping of it.
pub struct Backing {
    /// The file. Whoever has it can punch it, so only [`Puncher`](super::Puncher) gets it.
    pub(super) file: RamFile,
    /// Mapping of the whole file in this process, not watched by the userfaultfd.
    pub mapping: Mapping,
}

impl Backing {
    /// A file, and a mapping of all of it in this process.
    pub fn new(file: RamFile, mapping: Mapping) -> Backing {
        Backing { file, mapping }
    }

    /// Returns a stand-in for a file that the VMM no longer has. All of it is a hole, and nobody
    /// else has it.
    ///
    /// # Errors
    /// As memfd_create(2) and mmap(2).
    pub fn stand_in(bytes: u64) -> io::Result<Backing> {
        let file = RamFile::create("ebb-unplugged", bytes)?;
        let mapping = Mapping::new(&file, 0, bytes)?;
        Ok(Backing { file, mapping })
    }

    /// As [`RamFile::identity`].
    ///
    /// # Errors
    /// As fstat(2).
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        self.file.identity()
    }

    /// As [`RamFile::is_hugetlb`].
    ///
    /// # Errors
    /// As fstatfs(2).
    pub fn is_hugetlb(&self) -> io::Result<bool> {
        self.file.is_hugetlb()
    }

    /// As [`RamFile::resident_bytes`].
    ///
    /// # Errors
    /// As fstat(2).
    pub fn resident_bytes(&self) -> io::Result<u64> {
        self.file.resident_bytes()
    }

    /// Maps a part of the file once more, as [`Mapping::new`] does.
    ///
    /// # Errors
    /// As mmap(2) and madvise(2).
    pub fn map(&self, offset: u64, bytes: u64) -> io::Result<Mapping> {
        Mapping::new(&self.file, offset, bytes)
    }

    /// Releases the file, and puts a stand-in in its place. The file's memory stays as long as
    /// somebody else has it.
    ///
    /// # Errors
    /// As [`Backing::stand_in`], and as dup3(2).
    pub fn release(&self) -> io::Result<()> {
        let stand_in = RamFile::create("ebb-unplugged", self.mapping.bytes())?;
        self.mapping.replace(&stand_in)?;
        self.file.replace(&stand_in)
    }
}
