//! The host's side of a block: its memory.

use std::fs::File;
use std::io;

use ebb_units::{FrameRange, Gpa};
use rustix::fs::{FallocateFlags, fallocate};

use crate::geometry::Geometry;

/// Gives blocks their memory, and takes it. Frames are whole blocks of the region.
///
/// Called by one thread at a time, while the device holds its lock: no request and no
/// change of the requested size comes in between. It may take its time; the
/// configuration space can be read meanwhile.
///
/// Both may be told again of what they have done already, when a device process comes
/// back after its death, and then do nothing but make sure of it.
pub trait Memory: Send {
    /// The guest may use these frames as soon as this returns. Frames that are plugged
    /// keep their content. `prealloc`: all of their memory is there on return, and a
    /// host that has not enough says so now and not at a touch.
    ///
    /// # Errors
    /// They cannot be had now; all is as it was. The driver is told `BUSY`.
    fn plug(&mut self, frames: FrameRange, prealloc: bool) -> io::Result<()>;

    /// The guest does not use these frames any more, and they have no memory on return.
    ///
    /// # Errors
    /// Their memory cannot be taken now. The guest may go on using all of them; their
    /// content may be gone. The driver is told `BUSY`.
    fn unplug(&mut self, frames: FrameRange) -> io::Result<()>;
}

/// Memory in a file that the VMM maps shared: a memfd, or on hugetlbfs with blocks of
/// whole huge pages. A hole where it is unplugged; a touch of that is not noticed.
pub struct FileMemory {
    file: File,
    offset: u64,
    start: Gpa,
}

impl FileMemory {
    /// The region of `geometry` begins at `offset` of the file, in bytes.
    pub fn new(file: File, offset: u64, geometry: &Geometry) -> FileMemory {
        FileMemory { file, offset, start: geometry.start }
    }

    /// As fallocate(2).
    fn allocate(&self, frames: FrameRange, flags: FallocateFlags) -> io::Result<()> {
        let inside = frames.start.gpa().0.checked_sub(self.start.0);
        let offset = inside.and_then(|inside| inside.checked_add(self.offset));
        let offset = offset.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(fallocate(&self.file, flags, offset, frames.bytes())?)
    }
}

impl Memory for FileMemory {
    fn plug(&mut self, frames: FrameRange, prealloc: bool) -> io::Result<()> {
        // On error the file system gives back what it has allocated for this call.
        if prealloc { self.allocate(frames, FallocateFlags::KEEP_SIZE) } else { Ok(()) }
    }

    fn unplug(&mut self, frames: FrameRange) -> io::Result<()> {
        self.allocate(frames, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use ebb_units::FRAME_BYTES;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn blocks_of_a_file_come_and_go() {
        let file = File::from(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(64 << 20).unwrap();
        let geometry = Geometry {
            start: Gpa(4 << 30),
            region_bytes: 32 << 20,
            block_bytes: 2 << 20,
            node: None,
        };
        let mut memory = FileMemory::new(file.try_clone().unwrap(), 32 << 20, &geometry);
        let bytes = || file.metadata().unwrap().blocks() * 512;
        let second = geometry.frames(&(1..2));
        memory.plug(second, false).unwrap();
        assert_eq!(bytes(), 0);
        memory.plug(second, true).unwrap();
        assert_eq!(bytes(), 2 << 20);
        file.write_all_at(&[7], 34 << 20).unwrap();
        memory.plug(second, true).unwrap();
        let mut read = [0; FRAME_BYTES as usize];
        file.read_exact_at(&mut read, 34 << 20).unwrap();
        assert_eq!(read[0], 7, "what is plugged keeps its content");
        memory.unplug(geometry.frames(&(0..16))).unwrap();
        assert_eq!(bytes(), 0);
        file.read_exact_at(&mut read, 34 << 20).unwrap();
        assert_eq!(read[0], 0);
        let below = FrameRange::new(Gpa(4096).gfn(), 1);
        assert_eq!(memory.unplug(below).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
