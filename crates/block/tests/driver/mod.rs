//! The driver's side of a queue, in the test's own memory.
#![allow(dead_code, reason = "each test uses its part")]

pub mod front_end;

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use ebb_block::solo::{Rings, Solo};
use ebb_block::{Access, Block, Counts, Direction, Dma, DmaFault, Image, Observer, Segment};
use ebb_units::Gfn;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

pub const RAM_BYTES: u64 = 4 << 20;
pub const RINGS: Rings = Rings { descriptors: 0, available: 0x4000, used: 0x8000, size: 256 };
/// Where headers and statuses are, one line for each request. Free memory begins after it.
const LINES: u64 = 0x1_0000;
pub const FREE: u64 = 0x2_0000;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

/// A piece of memory in a chain: (address, bytes).
pub type Piece = (u64, u32);

/// Memory that the device may use up to an address, and a count of the pinned bytes.
#[derive(Default)]
pub struct Gate {
    pub closed_from: Mutex<Option<u64>>,
    /// An address whose frame is not available now, and how many more tries for it fail.
    pub unavailable: Mutex<Option<(u64, u32)>>,
    pinned_bytes: AtomicI64,
}

impl Gate {
    fn count(&self, segments: &[Segment], sign: i64) {
        let bytes: i64 = segments.iter().map(|segment| i64::from(segment.bytes)).sum();
        self.pinned_bytes.fetch_add(sign * bytes, Ordering::SeqCst);
    }
}

impl Gate {
    fn is_unavailable(&self, segments: &[Segment]) -> bool {
        let mut unavailable = self.unavailable.lock().unwrap();
        let Some((gpa, left)) = &mut *unavailable else { return false };
        let holds = |s: &Segment| (s.gpa.0..s.gpa.0 + u64::from(s.bytes)).contains(gpa);
        let asked = *left > 0 && segments.iter().any(holds);
        *left -= u32::from(asked);
        asked
    }
}

impl Dma for Gate {
    fn pin(&self, segments: &[Segment], _: Access) -> Result<(), DmaFault> {
        let from = self.closed_from.lock().unwrap().unwrap_or(u64::MAX);
        let end = |segment: &&Segment| segment.gpa.0 + u64::from(segment.bytes) > from;
        match segments.iter().find(end) {
            Some(segment) => Err(DmaFault::Forbidden(segment.gpa)),
            None if self.is_unavailable(segments) => Err(DmaFault::NotNow(segments[0].gpa)),
            None => {
                self.count(segments, 1);
                Ok(())
            }
        }
    }

    fn unpin(&self, segments: &[Segment]) {
        self.count(segments, -1);
    }
}

/// A block, a frame, the direction and the content.
pub type Moved = (u64, Gfn, Direction, Box<Block>);

/// Records each call.
#[derive(Default)]
pub struct Watcher {
    pub overwritten: Mutex<Vec<Range<u64>>>,
    pub moved: Mutex<Vec<Moved>>,
    pub refuses: Mutex<bool>,
}

impl Observer for Watcher {
    fn wants_content(&self) -> bool {
        true
    }

    fn before_overwrite(&self, blocks: Range<u64>) -> io::Result<()> {
        if *self.refuses.lock().unwrap() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.overwritten.lock().unwrap().push(blocks);
        Ok(())
    }

    fn moved(&self, block: u64, gfn: Gfn, content: &Block, direction: Direction) {
        self.moved.lock().unwrap().push((block, gfn, direction, Box::new(*content)));
    }
}

/// The driver's side of the queue.
pub struct Ring {
    pub memory: GuestMemoryMmap,
    pub next: u16,
    descriptor: u16,
    line: u64,
}

/// A disk and its driver.
pub struct Driver {
    ring: Ring,
    pub gate: Arc<Gate>,
    pub solo: Solo,
}

impl Deref for Driver {
    type Target = Ring;

    fn deref(&self) -> &Ring {
        &self.ring
    }
}

impl DerefMut for Driver {
    fn deref_mut(&mut self) -> &mut Ring {
        &mut self.ring
    }
}

impl Driver {
    pub fn new(image: Image, observer: Arc<dyn Observer>, use_ring: bool) -> Driver {
        let ranges = [(GuestAddress(0), RAM_BYTES as usize)];
        let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        let gate = Arc::new(Gate::default());
        let solo =
            Solo::new(image, memory.clone(), RINGS, gate.clone(), observer, use_ring).unwrap();
        Driver { ring: Ring::new(memory), gate, solo }
    }

    pub fn counts(&self) -> Counts {
        self.solo.counts()
    }

    /// Serves one request and returns its status.
    pub fn request(&mut self, kind: u32, sector: u64, sent: &[Piece], wanted: &[Piece]) -> u8 {
        let status = self.prepare(kind, sector, sent, wanted);
        self.serve();
        self.get(status, 1)[0]
    }

    pub fn read(&mut self, sector: u64, wanted: &[Piece]) -> u8 {
        self.request(IN, sector, &[], wanted)
    }

    pub fn write(&mut self, sector: u64, sent: &[Piece]) -> u8 {
        self.request(OUT, sector, sent, &[])
    }

    /// Discards or zeroes one range and returns the status.
    pub fn range(&mut self, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
        let at = RAM_BYTES - 16;
        let entry = u128::from(sector) | u128::from(count) << 64 | u128::from(flags) << 96;
        self.put(at, &entry.to_le_bytes());
        self.request(kind, 0, &[(at, 16)], &[])
    }

    /// Serves all that is available, and checks that only the rings stay pinned.
    pub fn serve(&mut self) {
        self.solo.serve();
        let rings = i64::from(RINGS.size) * 26 + 12;
        assert_eq!(self.gate.pinned_bytes.load(Ordering::SeqCst), rings);
        assert_eq!(self.used(), self.next, "all is used");
    }
}

impl Ring {
    pub fn new(memory: GuestMemoryMmap) -> Ring {
        Ring { memory, next: 0, descriptor: 0, line: LINES }
    }

    pub fn put(&self, gpa: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(gpa)).unwrap();
    }

    pub fn get(&self, gpa: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.memory.read_slice(&mut read, GuestAddress(gpa)).unwrap();
        read
    }

    /// Makes a chain available as it is, and returns its place in the used ring.
    pub fn offer(&mut self, readable: &[Piece], writable: &[Piece]) -> u16 {
        let head = self.descriptor;
        let count = readable.len() + writable.len();
        let flagged =
            readable.iter().map(|piece| (piece, 0)).chain(writable.iter().map(|p| (p, 2)));
        for (index, (&(gpa, bytes), flag)) in flagged.enumerate() {
            let place = (head + index as u16) % RINGS.size;
            let flags = flag | u128::from(index + 1 < count);
            let next = u128::from((place + 1) % RINGS.size);
            let word = u128::from(gpa) | u128::from(bytes) << 64 | flags << 96 | next << 112;
            self.put(RINGS.descriptors + 16 * u64::from(place), &word.to_le_bytes());
        }
        self.descriptor = (head + count as u16) % RINGS.size;
        let slot = self.next;
        let entry = RINGS.available + 4 + 2 * u64::from(slot % RINGS.size);
        self.put(entry, &head.to_le_bytes());
        self.next = slot.wrapping_add(1);
        self.put(RINGS.available + 2, &self.next.to_le_bytes());
        slot
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

    /// Returns the used index.
    pub fn used(&self) -> u16 {
        u16::from_le_bytes(self.get(RINGS.used + 2, 2).try_into().unwrap())
    }

    /// Returns the entry at a place of the used ring: (head, bytes written).
    pub fn used_at(&self, slot: u16) -> (u32, u32) {
        let entry = self.get(RINGS.used + 4 + 8 * u64::from(slot % RINGS.size), 8);
        let word = u64::from_le_bytes(entry.try_into().unwrap());
        (word as u32, (word >> 32) as u32)
    }
}

/// Makes a file of `bytes` and opens it as an image.
pub fn image(bytes: u64, readonly: bool, direct: bool) -> (tempfile::NamedTempFile, Image) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    let image = Image::open_with(file.path(), readonly, direct).unwrap();
    (file, image)
}
