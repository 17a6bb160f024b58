//! A request queue of any content: `available, then descriptors, heads and requests...`. The queue
//! always ends. No more is plugged than was requested, only plugging gives the region memory, and
//! no byte outside RAM is written.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use ebb_units::Gpa;
use ebb_vhost::AllResident;
use ebb_virtio_mem::{Device, DeviceParts, FileMemory, Geometry, NotSaved, Options, Saved, Sizes};
use ebb_virtio_mem_user::solo::Solo;
use testkit::virtqueue::Rings;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const RAM_BYTES: usize = 64 << 10;
const RINGS: Rings = Rings { descriptors: 0, available: 0x1000, used: 0x2000, size: 16 };
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
/// Start of the region, right behind RAM, so that an overrun of one reaches the other.
const START: u64 = RAM_BYTES as u64;

/// Runs one input.
pub fn run(data: &[u8]) {
    let [flags, count, data @ ..] = data else { return };
    let region = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    region.set_len(BLOCKS * BLOCK).expect("room for it");
    let ram = memory(&region);
    fill(&ram, data);
    // Number of available entries, whatever else the ring contains.
    let available = u16::from(*count % (RINGS.size as u8 + 2));
    ram.write_obj(available, GuestAddress(RINGS.available + 2)).expect("it is in memory");
    let device = Arc::new(device(&region, flags & 1 == 1));
    let requested = u64::from(flags >> 1 & 31) * BLOCK;
    device.request_bytes(requested).expect("a good size");
    let mut solo = Solo::new(device, Arc::new(ram), RINGS, Arc::new(AllResident)).expect("a queue");
    solo.serve();
    let Sizes { plugged_bytes, requested_bytes, .. } = solo.device().sizes();
    assert!(plugged_bytes <= requested_bytes && requested_bytes == requested);
    let bytes = region.metadata().expect("it is there").blocks() * 512;
    assert!(bytes <= plugged_bytes, "{bytes} bytes, and {plugged_bytes} plugged");
}

fn device(region: &File, prealloc: bool) -> Device {
    let geometry = Geometry {
        start: Gpa(START),
        region_bytes: BLOCKS * BLOCK,
        block_bytes: BLOCK,
        node: None,
    };
    let file = region.try_clone().expect("a descriptor");
    let parts = DeviceParts {
        memory: Box::new(FileMemory::new(file, 0, &geometry)),
        record: Box::new(NotSaved),
        notify: Box::new(|| {}),
    };
    let options = Options { inaccessible: true, prealloc, spare_bytes: 8 * BLOCK };
    Device::start(Saved::new(geometry).expect("a good region"), options, parts)
        .expect("a host that does what it is asked")
}

fn memory(region: &File) -> GuestMemoryMmap {
    let region = FileOffset::new(region.try_clone().expect("a descriptor"), 0);
    let ranges = [
        (GuestAddress(0), RAM_BYTES, None),
        (GuestAddress(START), (BLOCKS * BLOCK) as usize, Some(region)),
    ];
    GuestMemoryMmap::from_ranges_with_files(ranges).expect("memory")
}

/// Fills in descriptors, ring entries and requests, each made likely to lead somewhere.
fn fill(ram: &GuestMemoryMmap, data: &[u8]) {
    for (index, piece) in (0u64..).zip(data.chunks(16)).take(16) {
        let mut descriptor = [0; 16];
        descriptor[..piece.len()].copy_from_slice(piece);
        if index % 4 != 3 {
            // Address, length, flags and link have 8, 4, 2 and 2 bytes. They are made to be near
            // RAM, short, and linked.
            [3..8, 9..12, 13..14, 15..16].into_iter().for_each(|part| descriptor[part].fill(0));
            descriptor[2] &= 1;
            descriptor[12] &= 7;
            descriptor[14] %= 17;
        }
        let _ = ram.write_slice(&descriptor, GuestAddress(RINGS.descriptors + 16 * index));
    }
    let rest = data.get(16 * 16..).unwrap_or_default();
    let (heads, rest) = rest.split_at(rest.len().min(16));
    for (index, &head) in (0u64..).zip(heads) {
        let _ = ram.write_obj(u16::from(head % 18), GuestAddress(RINGS.available + 4 + 2 * index));
    }
    // Requests may be anywhere, so the same ones repeat, each with a block of the region.
    for (index, piece) in (0u64..).zip(rest.chunks(4).cycle()).take(RAM_BYTES / 32 - 0x180) {
        let [kind, block, count, ..] = piece else { return };
        let mut request = [0; 32];
        request[0] = kind % 5;
        let gpa = START + u64::from(block % (BLOCKS as u8 + 2)) * BLOCK;
        request[8..16].copy_from_slice(&gpa.to_le_bytes());
        request[16] = count % 20;
        let _ = ram.write_slice(&request, GuestAddress(0x3000 + 32 * index));
    }
}
