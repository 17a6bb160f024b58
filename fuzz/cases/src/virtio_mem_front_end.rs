//! A front end that sends anything: `kind, flags, files, bytes` and that many bytes for each
//! message. Each message is handled without waiting. No more is plugged than was requested, and
//! only plugging gives the region memory.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ebb_units::Gpa;
use ebb_vhost::AllResident;
use ebb_virtio_mem::{Device, DeviceParts, FileMemory, Geometry, NotSaved, Options, Saved};
use ebb_virtio_mem_user::solo::converse;

use crate::vhost_user::{Memory, say};

const RAM_BYTES: u64 = 64 << 10;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
const MEMORY: Memory = Memory { bytes: RAM_BYTES, address: 1 << 20, second_bytes: BLOCKS * BLOCK };

/// Runs one input.
pub fn run(data: &[u8]) {
    let [seed, messages @ ..] = data else { return };
    let [ram, other] = [RAM_BYTES, BLOCKS * BLOCK].map(file);
    let region = file(BLOCKS * BLOCK);
    let pattern: Vec<u8> = messages.iter().copied().cycle().take(RAM_BYTES as usize).collect();
    if !pattern.is_empty() {
        std::os::unix::fs::FileExt::write_all_at(&ram, &pattern, 0).expect("room for it");
    }
    let device = device(&region);
    let requested = u64::from(seed % 64) * BLOCK;
    device.request_bytes(requested).expect("a good size");
    let (mut front_end, theirs) = UnixStream::pair().expect("sockets");
    front_end.set_nonblocking(true).expect("a socket");
    let mut rest = messages;
    converse(&device, Arc::new(AllResident), theirs, || {
        let mut answers = [0; 4096];
        while matches!(front_end.read(&mut answers), Ok(1..)) {}
        let [kind, flags, files, count, more @ ..] = rest else { return false };
        let (body, after) = more.split_at(usize::from(*count).min(more.len()));
        rest = after;
        let files = match files % 4 {
            0 => vec![],
            1 => vec![ram.as_fd()],
            2 => vec![ram.as_fd(), other.as_fd()],
            _ => vec![other.as_fd(); usize::from(files / 4 % 12)],
        };
        say(&front_end, (u32::from(kind % 48), *flags), body, &files, &MEMORY)
    });
    let sizes = device.sizes();
    assert!(sizes.plugged_bytes <= sizes.requested_bytes);
    let bytes = region.metadata().expect("it is there").blocks() * 512;
    assert!(bytes <= sizes.plugged_bytes);
}

fn file(bytes: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    file.set_len(bytes).expect("room for it");
    file
}

fn device(region: &File) -> Device {
    let geometry = Geometry {
        start: Gpa(RAM_BYTES),
        region_bytes: BLOCKS * BLOCK,
        block_bytes: BLOCK,
        node: Some(1),
    };
    let file = region.try_clone().expect("a descriptor");
    let parts = DeviceParts {
        memory: Box::new(FileMemory::new(file, 0, &geometry)),
        record: Box::new(NotSaved),
        notify: Box::new(|| {}),
    };
    let options = Options { spare_bytes: 8 * BLOCK, ..Options::default() };
    Device::start(Saved::new(geometry).expect("a good region"), options, parts)
        .expect("a host that does what it is asked")
}
