//! The host's side of a block: its memory.

use std::fs::File;
use std::io;

use ebb_units::{FrameRange, Gpa};
use rustix::fs::{FallocateFlags, fallocate};

use crate::geometry::Geometry;

/// Gives blocks their memory, and takes it. Frames are always whole blocks of the region.
///
/// One thread at a time calls it, while the device holds its lock: no request and no change of the
/// requested size comes in between. A call may take long; the configuration space can be read
/// meanwhile.
///
/// After a death of the device's process, both methods may be called again for what they have done
/// already. They then only make sure of it.
pub trait BlockMemory: Send {
    /// Plugs frames: the guest may use them as soon as this returns. Frames that are already
    /// plugged keep their content. With `prealloc`, all of their memory is there on return, so a
    /// host that lacks memory fails now and not at a touch.
    ///
    /// # Errors
    /// The frames cannot be had now, and nothing has changed. The driver gets `BUSY`.
    fn plug(&mut self, frames: FrameRange, prealloc: bool) -> io::Result<()>;

    /// Unplugs frames that the guest does not use any more. They have no memory on return.
    ///
    /// # Errors
    /// Their memory cannot be taken now. The guest may go on using all of the frames, but their
    /// content may be lost. The driver gets `BUSY`.
    fn unplug(&mut self, frames: FrameRange) -> io::Result<()>;
}

/// Memory in a file that the VMM maps shared: a memfd, or a file on hugetlbfs with blocks of whole
/// huge pages. Unplugged memory is a hole. A touch of a hole is not noticed.
pub struct FileMemory {
    file: File,
    offset: u64,
    start: Gpa,
}

impl FileMemory {
    /// Makes the memory of a region that begins at `offset` of the file, in bytes.
    pub fn new(file: File, offset: u64, geometry: &Geometry) -> FileMemory {
        FileMemory { file, offset, start: geometry.start }
    }

    /// Calls fallocate(2) for these frames.
    fn allocate(&self, frames: FrameRange, flags: FallocateFlags) -> io::Result<()> {
        let inside = frames.start.gpa().0.checked_sub(self.start.0);
        let offset = inside.and_then(|inside| inside.checked_add(self.offset));
        let offset = offset.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(fallocate(&self.file, flags, offset, frames.bytes())?)
    }
}

impl BlockMemory for FileMemory {
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
