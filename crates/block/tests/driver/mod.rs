//! A disk with its driver, and who watches it.
#![allow(dead_code, reason = "each test uses its part")]

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use ebb_block::solo::Solo;
use ebb_block::{Access, Block, Counts, Direction, Dma, DmaFault, Image, Observer, Segment};
use ebb_units::Gfn;
use testkit::disk::{IN, OUT, RINGS, Ring};
use testkit::virtqueue::Piece;
use vm_memory::{GuestAddress, GuestMemoryMmap};

pub const RAM_BYTES: u64 = 4 << 20;

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

/// Makes a file of `bytes` and opens it as an image.
pub fn image(bytes: u64, readonly: bool, direct: bool) -> (tempfile::NamedTempFile, Image) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    let image = Image::open_with(file.path(), readonly, direct).unwrap();
    (file, image)
}
