//! A queue of any content: `flags | index, places and descriptors...`. The input fills half of the
//! memory: rings, chains and headers alike. Whatever it is, the queue comes to rest, and no byte
//! outside the image is written.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use ebb_block::solo::Solo;
use ebb_block::{AllResident, Image, Nobody, Observer};
use testkit::virtqueue::Rings;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const RAM_BYTES: usize = 64 << 10;
const IMAGE_BYTES: u64 = 64 << 10;
const RINGS: Rings = Rings { descriptors: 0, available: 0x1000, used: 0x2000, size: 16 };

/// The image: in memory, and without a name that would be left behind.
static IMAGE: LazyLock<File> =
    LazyLock::new(|| tempfile::tempfile_in("/dev/shm").expect("a file in memory"));

/// An observer that sees all requests, and refuses some.
struct Choosy;

impl Observer for Choosy {
    fn wants_content(&self) -> bool {
        true
    }

    fn before_overwrite(&self, blocks: std::ops::Range<u64>) -> std::io::Result<()> {
        assert!(blocks.start < blocks.end && blocks.end <= IMAGE_BYTES / 4096);
        if blocks.contains(&7) { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn moved(
        &self,
        block: u64,
        gfn: ebb_units::Gfn,
        _: &ebb_block::Block,
        _: ebb_block::Direction,
    ) {
        assert!(block < IMAGE_BYTES / 4096 && gfn.0 < RAM_BYTES as u64 / 4096);
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let [flags, count, memory @ ..] = data else { return };
    // The image is all zeros again, so that no file system is seen in it.
    IMAGE.set_len(0).and_then(|()| IMAGE.set_len(IMAGE_BYTES)).expect("room for it");
    let path = PathBuf::from(format!("/proc/self/fd/{}", IMAGE.as_raw_fd()));
    let image = Image::open_with(&path, flags & 1 == 1, false).expect("an image");
    let observer: Arc<dyn Observer> =
        if flags & 2 == 2 { Arc::new(Choosy) } else { Arc::new(Nobody) };
    let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).expect("memory");
    fill(&ram, memory);
    // Number of available entries, whatever else the ring contains.
    let available = u16::from(*count % (RINGS.size as u8 + 2));
    ram.write_obj(available, GuestAddress(RINGS.available + 2)).expect("it is in memory");
    let mut solo = Solo::new(image, ram, RINGS, Arc::new(AllResident), observer, flags & 4 == 4)
        .expect("a queue");
    solo.set_config(32, &[flags >> 3 & 1]);
    solo.serve();
    let counts = solo.counts();
    let done = counts.reads + counts.writes + counts.flushes + counts.discards;
    assert!(done + counts.write_zeroes + counts.failed <= 1000 * u64::from(RINGS.size));
    drop(solo);
    assert_eq!(IMAGE.metadata().expect("it is there").len(), IMAGE_BYTES);
}

/// Fills in descriptors, ring entries and headers, each made likely to lead somewhere.
fn fill(ram: &GuestMemoryMmap, data: &[u8]) {
    let mut at = GuestAddress(RINGS.descriptors);
    for (index, piece) in (0u64..).zip(data.chunks(16)).take(16) {
        let mut descriptor = [0; 16];
        descriptor[..piece.len()].copy_from_slice(piece);
        if index % 4 != 3 {
            // Address, length, flags and link have 8, 4, 2 and 2 bytes. They are made to be in
            // memory, short, and linked.
            [2..8, 10..12, 13..14, 15..16].into_iter().for_each(|part| descriptor[part].fill(0));
            descriptor[12] &= 7;
            descriptor[14] %= 17;
        }
        let _ = ram.write_slice(&descriptor, at);
        at.0 += 16;
    }
    let rest = data.get(16 * 16..).unwrap_or_default();
    let (heads, rest) = rest.split_at(rest.len().min(16));
    for (index, &head) in (0u64..).zip(heads) {
        let _ = ram.write_obj(u16::from(head % 18), GuestAddress(RINGS.available + 4 + 2 * index));
    }
    // Headers, ranges and tables may be anywhere, so the same bytes repeat over and over.
    if !rest.is_empty() {
        let pattern: Vec<u8> = rest.iter().copied().cycle().take(RAM_BYTES - 0x3000).collect();
        let _ = ram.write_slice(&pattern, GuestAddress(0x3000));
    }
}
