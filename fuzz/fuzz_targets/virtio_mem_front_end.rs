//! A front end that says anything: `kind, flags, files, bytes` and as many bytes for each
//! message. Whatever it is, each is heard without waiting; no more is plugged than was
//! requested, and memory comes to the region by plugging only.
#![no_main]

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ebb_units::Gpa;
use ebb_vhost::AllResident;
use ebb_virtio_mem::{Device, FileMemory, Geometry, NotKept, Options, Parts, Saved};
use ebb_virtio_mem_user::solo::converse;
use libfuzzer_sys::fuzz_target;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const RAM_BYTES: u64 = 64 << 10;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
/// Where the front end has its memory.
const FRONT_END: u64 = 1 << 20;

fuzz_target!(|data: &[u8]| {
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
        say(&front_end, u32::from(kind % 48), *flags, body, &files)
    });
    let sizes = device.sizes();
    assert!(sizes.plugged_bytes <= sizes.requested_bytes);
    let bytes = region.metadata().expect("it is there").blocks() * 512;
    assert!(bytes <= sizes.plugged_bytes);
});

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
    let parts = Parts {
        memory: Box::new(FileMemory::new(file, 0, &geometry)),
        record: Box::new(NotKept),
        notify: Box::new(|| {}),
    };
    let options = Options { spare_bytes: 8 * BLOCK, ..Options::default() };
    Device::start(Saved::new(geometry).expect("a good region"), options, parts)
        .expect("a host that does what it is asked")
}

/// Sends it, made likely to say something; `false`: the connection has ended.
fn say(to: &UnixStream, kind: u32, flags: u8, body: &[u8], files: &[BorrowedFd<'_>]) -> bool {
    let body: Vec<u8> = match (kind, flags >> 4 & 3) {
        // A table of RAM, and rings in it.
        (5, 0) => words(&[1, 0, RAM_BYTES, FRONT_END, 0]),
        (5, 1) => {
            let region = [RAM_BYTES, BLOCKS * BLOCK, FRONT_END * 2, 0];
            words(&[&[2, 0, RAM_BYTES, FRONT_END, 0], &region[..]].concat())
        }
        (8, 0) => words(&[16 << 32]),
        (9, 0) => words(&[0, FRONT_END, FRONT_END + 0x2000, FRONT_END + 0x1000, 0]),
        (10..=18, 0) => words(&[0]),
        (18, 1) => words(&[1 << 32]),
        _ => body.to_vec(),
    };
    let version = if flags & 7 == 7 { u32::from(flags) } else { 1 | u32::from(flags & 8) };
    let length = if flags >> 6 == 3 { body.len() as u32 + 3 } else { body.len() as u32 };
    let header = [kind, version, length].map(u32::to_ne_bytes);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    }
    let parts = [IoSlice::new(header.as_flattened()), IoSlice::new(&body)];
    sendmsg(to, &parts, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
