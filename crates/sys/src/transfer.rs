//! Transfers between a file and memory: a buffer of ours, or a guest's RAM.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ebb_units::FRAME_BYTES;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// A transfer fails when it ends with `EINTR` or `EAGAIN` for this many times.
const IDLE_ROUNDS_MAX: u32 = 64;

/// A buffer of ours for direct I/O: it begins on a page.
pub struct AlignedBuffer {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns what `start` points to, as a Box would.
unsafe impl Send for AlignedBuffer {}
// SAFETY: shared references only read.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// Returns `bytes` bytes of zeros, but at least a page.
    pub fn new(bytes: usize) -> AlignedBuffer {
        let layout = AlignedBuffer::layout(bytes);
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        AlignedBuffer { start, bytes: layout.size() }
    }

    fn layout(bytes: usize) -> Layout {
        let page = FRAME_BYTES as usize;
        Layout::from_size_align(bytes.max(page), page).expect("buffers are far from isize::MAX")
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this size, initialised, and owned.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with the same layout.
        unsafe { dealloc(self.start.as_ptr(), AlignedBuffer::layout(self.bytes)) }
    }
}

/// The memory of a transfer; handed back when it ends.
pub enum TransferMemory {
    /// None: nothing is moved.
    None,
    /// The first bytes of a buffer of ours.
    Own(AlignedBuffer),
    /// A guest's RAM, mapped for as long as this lives.
    Guest(Arc<GuestMemoryMmap>),
}

/// What to do with a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Read into the memory.
    Read,
    /// Write from the memory.
    Write {
        /// Whether the data is on the disk when the write ends.
        durable: bool,
    },
    /// Make what was written before reach the disk: fdatasync(2).
    Sync,
}

/// One operation on a file. It succeeds as a whole, or fails.
pub struct Transfer {
    pub(crate) file: Arc<File>,
    pub(crate) operation: Operation,
    pub(crate) offset: u64,
    /// The pieces of memory still to be moved.
    pub(crate) parts: Vec<libc::iovec>,
    memory: TransferMemory,
    idle_rounds: u32,
}

// SAFETY: `parts` points into `memory`. That is owned, or a guest's RAM, which any thread may write
// to at the same time.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Returns a transfer of the first `bytes` of a buffer.
    ///
    /// # Errors
    /// `InvalidInput`: the buffer is smaller.
    pub fn own(
        file: Arc<File>,
        operation: Operation,
        offset: u64,
        mut buffer: AlignedBuffer,
        bytes: usize,
    ) -> io::Result<Transfer> {
        let part = buffer.get_mut(..bytes).ok_or(io::ErrorKind::InvalidInput)?;
        let parts = vec![libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: bytes }];
        Ok(Transfer::new(file, operation, offset, parts, TransferMemory::Own(buffer)))
    }

    /// Returns a transfer of these pieces of a guest's RAM: (guest-physical address, bytes) each.
    ///
    /// # Errors
    /// `InvalidInput`: a piece is not in RAM, or there are more parts than one call takes (1024;
    /// each part lies in one region).
    pub fn guest(
        file: Arc<File>,
        operation: Operation,
        offset: u64,
        memory: Arc<GuestMemoryMmap>,
        pieces: impl Iterator<Item = (u64, usize)>,
    ) -> io::Result<Transfer> {
        let mut parts = Vec::new();
        for (gpa, bytes) in pieces {
            for slice in GuestMemoryBackend::get_slices(&*memory, GuestAddress(gpa), bytes) {
                let slice = slice.map_err(|_| io::ErrorKind::InvalidInput)?;
                let start = slice.ptr_guard_mut().as_ptr();
                parts.push(libc::iovec { iov_base: start.cast(), iov_len: slice.len() });
            }
        }
        match parts.len() <= libc::UIO_MAXIOV as usize {
            true => {
                Ok(Transfer::new(file, operation, offset, parts, TransferMemory::Guest(memory)))
            }
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Returns a transfer that makes all that was written reach the disk.
    pub fn sync(file: Arc<File>) -> Transfer {
        Transfer::new(file, Operation::Sync, 0, Vec::new(), TransferMemory::None)
    }

    fn new(
        file: Arc<File>,
        operation: Operation,
        offset: u64,
        parts: Vec<libc::iovec>,
        memory: TransferMemory,
    ) -> Transfer {
        Transfer { file, operation, offset, parts, memory, idle_rounds: 0 }
    }

    /// Runs the transfer to its end in this thread, and hands back its memory.
    pub fn run(mut self) -> (io::Result<()>, TransferMemory) {
        loop {
            let result = self.call();
            if let Some(end) = self.settle(result) {
                return (end, self.memory);
            }
        }
    }

    pub(crate) fn into_memory(self) -> TransferMemory {
        self.memory
    }

    /// Makes one system call. Returns its result, or a negative error number.
    fn call(&mut self) -> isize {
        let (fd, offset) = (self.file.as_raw_fd(), self.offset as libc::off_t);
        let (parts, count) = (self.parts.as_ptr(), self.parts.len() as libc::c_int);
        // SAFETY: `parts` are pieces of `memory`, which lives on, and to which nobody has a Rust
        // reference: a buffer of ours is borrowed by `self` alone, a guest's RAM is only ever seen
        // through pointers.
        let result = unsafe {
            match self.operation {
                Operation::Read => libc::preadv2(fd, parts, count, offset, 0),
                Operation::Write { durable } => {
                    libc::pwritev2(fd, parts, count, offset, write_flags(durable))
                }
                Operation::Sync => libc::fdatasync(fd) as isize,
            }
        };
        match result {
            -1 => -(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) as isize),
            result => result,
        }
    }

    /// Takes in the result of a call. Returns `None` if there is more to do.
    pub(crate) fn settle(&mut self, result: isize) -> Option<io::Result<()>> {
        let moved = match usize::try_from(result) {
            Ok(moved) => moved,
            Err(_) => {
                let number = -result as i32;
                self.idle_rounds += 1;
                let again = [libc::EINTR, libc::EAGAIN].contains(&number)
                    && self.idle_rounds < IDLE_ROUNDS_MAX;
                return (!again).then(|| Err(io::Error::from_raw_os_error(number)));
            }
        };
        if self.parts.is_empty() {
            return Some(Ok(()));
        }
        self.advance(moved);
        match (self.parts.is_empty(), moved, self.operation) {
            (true, ..) => Some(Ok(())),
            (false, 0, Operation::Read) => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            (false, 0, _) => Some(Err(io::ErrorKind::WriteZero.into())),
            _ => None,
        }
    }

    fn advance(&mut self, mut moved: usize) {
        self.offset += moved as u64;
        let whole = self.parts.iter().take_while(|part| {
            let fits = part.iov_len <= moved;
            moved -= if fits { part.iov_len } else { 0 };
            fits
        });
        let whole = whole.count();
        self.parts.drain(..whole);
        if let Some(part) = self.parts.first_mut() {
            part.iov_base = part.iov_base.wrapping_byte_add(moved);
            part.iov_len -= moved;
        }
    }
}

pub(crate) fn write_flags(durable: bool) -> libc::c_int {
    if durable { libc::RWF_DSYNC } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> Arc<File> {
        use std::io::Write;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Arc::new(file)
    }

    #[test]
    fn guest_memory_is_filled_piece_by_piece() {
        let regions = [(GuestAddress(0), 0x1000), (GuestAddress(0x1000), 0x1000)];
        let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&regions).unwrap());
        let pieces = [(0xffe, 4), (0x10, 2)].into_iter();
        let transfer =
            Transfer::guest(file(b"..abcdef"), Operation::Read, 2, memory.clone(), pieces).unwrap();
        transfer.run().0.unwrap();
        let read =
            |gpa| vm_memory::Bytes::read_obj::<[u8; 2]>(&*memory, GuestAddress(gpa)).unwrap();
        assert_eq!([read(0xffe), read(0x1000), read(0x10)], [*b"ab", *b"cd", *b"ef"]);
    }

    #[test]
    fn memory_that_is_not_there_is_refused() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let pieces = [(0xfff, 2)].into_iter();
        assert!(Transfer::guest(file(b""), Operation::Read, 0, Arc::new(memory), pieces).is_err());
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        let transfer =
            Transfer::own(file(b"abc"), Operation::Read, 0, AlignedBuffer::new(8), 8).unwrap();
        let (result, memory) = transfer.run();
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let TransferMemory::Own(buffer) = memory else { panic!("the buffer comes back") };
        assert_eq!(&buffer[..4], b"abc\0");
    }

    #[test]
    fn a_partial_transfer_goes_on_where_it_stopped() {
        let mut transfer =
            Transfer::own(file(b""), Operation::Read, 7, AlignedBuffer::new(4096), 100).unwrap();
        assert!(transfer.settle(30).is_none());
        assert_eq!((transfer.offset, transfer.parts[0].iov_len), (37, 70));
        assert!(transfer.settle(-(libc::EINTR as isize)).is_none());
        assert!(transfer.settle(70).unwrap().is_ok());
    }
}
