//! A driver's side of the request queue, and the host's side of the region, in the test's own
//! memory.
#![allow(dead_code, reason = "each test uses its part")]

pub mod front_end;

use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use ebb_units::Gpa;
use ebb_virtio_mem::{FileMemory, Geometry, Named, Request};
use rustix::fs::{MemfdFlags, memfd_create};
use testkit::virtqueue::{Queue, Rings};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

pub const RAM_BYTES: u64 = 1 << 20;
pub const RINGS: Rings = Rings { descriptors: 0, available: 0x4000, used: 0x8000, size: 64 };
/// Range of the requests: one line each, with 16 bytes for the answer behind the request.
const LINES: u64 = 0x1_0000;
const LINES_END: u64 = 0x8_0000;
const LINE_BYTES: u64 = 64;
const ANSWER: u64 = 32;

pub const BLOCK: u64 = 2 << 20;
pub const BLOCKS: u64 = 40;
pub const GEOMETRY: Geometry =
    Geometry { start: Gpa(1 << 32), region_bytes: BLOCKS * BLOCK, block_bytes: BLOCK, node: None };

pub const ACK: u8 = 0;
pub const NACK: u8 = 1;
pub const BUSY: u8 = 2;
pub const ERROR: u8 = 3;

/// The VM's memory: RAM, and the region in a file of its own.
pub struct Vm {
    pub memory: Arc<GuestMemoryMmap>,
    pub region: File,
}

impl Vm {
    pub fn new() -> Vm {
        let file = |name: &str, bytes: u64| {
            let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
            file.set_len(bytes).unwrap();
            file
        };
        let region = file("region", GEOMETRY.region_bytes);
        let range = |gpa, bytes: u64, file| {
            (GuestAddress(gpa), bytes as usize, Some(FileOffset::new(file, 0)))
        };
        let ranges = [
            range(0, RAM_BYTES, file("ram", RAM_BYTES)),
            range(GEOMETRY.start.0, GEOMETRY.region_bytes, region.try_clone().unwrap()),
        ];
        let memory = GuestMemoryMmap::from_ranges_with_files(ranges).unwrap();
        Vm { memory: Arc::new(memory), region }
    }

    /// Returns the memory that the device gives and takes.
    pub fn file_memory(&self) -> FileMemory {
        FileMemory::new(self.region.try_clone().unwrap(), 0, &GEOMETRY)
    }

    /// Returns the bytes of memory that the region has.
    pub fn region_bytes(&self) -> u64 {
        self.region.metadata().unwrap().blocks() * 512
    }

    /// Makes the guest use a block.
    pub fn touch(&self, block: u64) {
        self.put(GEOMETRY.start.0 + block * BLOCK, &[1; 4096]);
    }

    pub fn put(&self, gpa: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(gpa)).unwrap();
    }

    pub fn get<const N: usize>(&self, gpa: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_slice(&mut bytes, GuestAddress(gpa)).unwrap();
        bytes
    }
}

/// The driver's state.
pub struct Driver {
    pub vm: Vm,
    queue: Queue,
    line: u64,
}

impl Deref for Driver {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl DerefMut for Driver {
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.queue
    }
}

impl Driver {
    pub fn new() -> Driver {
        let vm = Vm::new();
        let queue = Queue::new((*vm.memory).clone(), RINGS);
        Driver { vm, queue, line: LINES }
    }

    /// Makes a request available. Returns the address of its answer.
    pub fn prepare(&mut self, request: Request) -> u64 {
        let line = self.new_line();
        self.vm.put(line, &request.to_bytes());
        self.offer(&[(line, 24)], &[(line + ANSWER, 10)]);
        line + ANSWER
    }

    /// Returns a place for a request, with `0xff` where the answer will be.
    pub fn new_line(&mut self) -> u64 {
        let line = self.line;
        self.line = if line + LINE_BYTES >= LINES_END { LINES } else { line + LINE_BYTES };
        self.vm.put(line + ANSWER, &[0xff; 16]);
        line
    }

    /// Returns the answer at a place.
    pub fn answer(&self, at: u64) -> u8 {
        self.vm.get::<1>(at)[0]
    }
}

pub fn named(first: u64, count: u16) -> Named {
    Named { start: Gpa(GEOMETRY.start.0 + first * BLOCK), count }
}

pub fn plug(first: u64, count: u16) -> Request {
    Request::Plug(named(first, count))
}

pub fn unplug(first: u64, count: u16) -> Request {
    Request::Unplug(named(first, count))
}

pub fn state(first: u64, count: u16) -> Request {
    Request::State(named(first, count))
}
