//! The files of a VMM's RAM, opened by the descriptors that the VMM keeps open.

use std::io;

use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use rustix::io::Errno;

use crate::ram::Backing;

/// The files opened so far, each once.
pub(super) struct Files<'p> {
    pub(super) process: &'p Process,
    pub(super) inodes: Vec<u64>,
    pub(super) backings: Vec<Backing>,
}

impl Files<'_> {
    pub(super) fn of(&mut self, inode: u64) -> io::Result<Option<usize>> {
        if let Some(index) = self.inodes.iter().position(|&known| known == inode) {
            return Ok(Some(index));
        }
        let Some(file) = open_memfd(self.process, inode)? else { return Ok(None) };
        // Sealed before it is mapped: its size must not change in between.
        let is_sealed = file.seal();
        let mapping = Mapping::new(&file, 0, file.bytes()?)?;
        let mapping = if is_sealed { mapping } else { mapping.guarded()? };
        self.inodes.push(inode);
        self.backings.push(Backing::new(file, mapping));
        Ok(Some(self.backings.len() - 1))
    }
}

/// Opens the memfd with this inode by the descriptor that the VMM keeps open.
fn open_memfd(process: &Process, inode: u64) -> io::Result<Option<RamFile>> {
    for (number, link) in process.descriptors()? {
        if link.starts_with("/memfd:") {
            let file = match process.descriptor(number) {
                Ok(descriptor) => RamFile::from(descriptor),
                // The VMM has closed it in the meantime.
                Err(error) if error.raw_os_error() == Some(Errno::BADF.raw_os_error()) => continue,
                Err(error) => return Err(error),
            };
            if file.identity()?.1 == inode {
                return Ok(Some(file));
            }
        }
    }
    Ok(None)
}
