//! The driver of a virtio-blk device (virtio 1.2, section 5.2).

use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::path::Path;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use crate::front_end::FrontEnd;
use crate::virtqueue::{Piece, Queue, Rings};

/// Where the queue is.
pub const RINGS: Rings = Rings { descriptors: 0, available: 0x4000, used: 0x8000, size: 256 };
/// Where headers and statuses are, one line for each request.
const LINES: u64 = 0x1_0000;
/// Where the memory begins that neither the queue nor a line uses.
pub const FREE: u64 = 0x2_0000;

/// Type of a request that reads.
pub const IN: u32 = 0;
/// Type of a request that writes.
pub const OUT: u32 = 1;
/// Type of a flush.
pub const FLUSH: u32 = 4;
/// Type of a request for the disk's ID.
pub const GET_ID: u32 = 8;
/// Type of a discard.
pub const DISCARD: u32 = 11;
/// Type of a request that zeroes.
pub const WRITE_ZEROES: u32 = 13;

/// Status of a request that was done.
pub const OK: u8 = 0;
/// Status of a request that has failed.
pub const IOERR: u8 = 1;
/// Status of a request that the device does not know.
pub const UNSUPP: u8 = 2;

/// Feature bit of event indices.
pub const EVENT_IDX: u64 = 1 << 29;

/// Makes memory that another process can map.
pub fn shared_memory(bytes: u64) -> GuestMemoryMmap {
    memory_with(MemfdFlags::CLOEXEC, bytes)
}

/// Makes memory that can be sealed, as QEMU does.
pub fn sealable_memory(bytes: u64) -> GuestMemoryMmap {
    memory_with(MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING, bytes)
}

fn memory_with(flags: MemfdFlags, bytes: u64) -> GuestMemoryMmap {
    let fd = memfd_create("ram", flags).unwrap();
    ftruncate(&fd, bytes).unwrap();
    let file = FileOffset::new(File::from(fd), 0);
    let ranges = [(GuestAddress(0), bytes as usize, Some(file))];
    GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
}

/// The driver's queue.
pub struct Ring {
    queue: Queue,
    line: u64,
}

impl Deref for Ring {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl DerefMut for Ring {
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.queue
    }
}

impl Ring {
    /// Makes an empty queue, at [`RINGS`].
    pub fn new(memory: GuestMemoryMmap) -> Ring {
        Ring { queue: Queue::new(memory, RINGS), line: LINES }
    }

    /// Makes a request available, and returns where its status will be.
    pub fn prepare(&mut self, kind: u32, sector: u64, sent: &[Piece], wanted: &[Piece]) -> u64 {
        let line = self.line;
        self.line = if line + 64 >= FREE { LINES } else { line + 32 };
        let header = u128::from(kind) | u128::from(sector) << 64;
        self.put(line, &header.to_le_bytes());
        self.put(line + 16, &[0xff]);
        let readable = [&[(line, 16)], sent].concat();
        self.offer(&readable, &[wanted, &[(line + 16, 1)]].concat());
        line + 16
    }
}

/// Connects as soon as somebody listens, and starts the queue at request `base`, without event
/// indices.
pub fn connect(socket: &Path, ring: &Ring, base: u16) -> FrontEnd {
    connect_without(EVENT_IDX, socket, ring, base)
}

/// As [`connect`], with all features of the device but `without`.
pub fn connect_without(without: u64, socket: &Path, ring: &Ring, base: u16) -> FrontEnd {
    let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ;
    let front_end = FrontEnd::connect(socket, wanted, without);
    front_end.start(ring, base);
    front_end.kick();
    front_end
}
