//! A file of RAM, mapped in this process.

use std::io;

use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;

/// One file of RAM, and Ebb's own mapping of it.
pub struct Backing {
    /// The file.
    pub file: RamFile,
    /// Mapping of the whole file in this process, not watched by the userfaultfd.
    pub mapping: Mapping,
}

impl Backing {
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
