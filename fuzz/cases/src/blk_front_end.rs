//! A disk's front end that sends anything: `kind, flags, files, bytes` and that many bytes for each
//! message. Whatever it sends, the next front end is served.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ebb_block::{AllResident, Backend, Image, Nobody, Options};
use rustix::event::{EventfdFlags, eventfd};

use crate::vhost_user::{Memory, say};

const IMAGE_BYTES: u64 = 64 << 10;
const MEMORY: Memory = Memory { bytes: 64 << 10, address: 1 << 20, second_bytes: 64 << 10 };
/// Header of `VHOST_USER_GET_FEATURES`, with flags and length.
const GET_FEATURES: [u32; 3] = [1, 1, 0];
/// Longest wait. It is long enough for a slow machine, but shorter than the fuzzer's own timeout.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs one input.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let socket = directory.path().join("disk");
    let [image, ram] = [IMAGE_BYTES, MEMORY.bytes].map(file);
    let path = PathBuf::from(format!("/proc/self/fd/{}", image.as_raw_fd()));
    let served = Image::open_with(&path, false, false).expect("an image");
    let (dma, observer) = (Arc::new(AllResident), Arc::new(Nobody));
    let options = Options { queues: 2, use_ring: false };
    let backend = Backend::start(&socket, served, dma, observer, options).expect("a socket");
    talk(&UnixStream::connect(&socket).expect("it listens"), &ram, data);
    ask_features(&socket);
    backend.stop();
    assert_eq!(image.metadata().expect("it is there").len(), IMAGE_BYTES);
}

fn file(bytes: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    file.set_len(bytes).expect("room for it");
    file
}

fn talk(front_end: &UnixStream, ram: &File, data: &[u8]) {
    let event = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event");
    let mut rest = data;
    while let [kind, flags, files, count, more @ ..] = rest {
        let (body, after) = more.split_at(usize::from(*count).min(more.len()));
        rest = after;
        let files = match files % 5 {
            0 => vec![],
            1 => vec![ram.as_fd()],
            2 => vec![event.as_fd()],
            3 => vec![ram.as_fd(), ram.as_fd()],
            _ => vec![ram.as_fd(); usize::from(files / 5 % 12)],
        };
        let message = (u32::from(kind % 48), *flags);
        if !say(front_end, message, body, &files, &MEMORY) {
            return;
        }
    }
}

/// Checks that a well-behaved front end gets an answer.
fn ask_features(socket: &std::path::Path) {
    let mut front_end = UnixStream::connect(socket).expect("it listens");
    front_end.set_read_timeout(Some(PATIENCE)).expect("a socket");
    front_end.write_all(GET_FEATURES.map(u32::to_ne_bytes).as_flattened()).expect("it is heard");
    front_end.read_exact(&mut [0; 20]).expect("an answer");
}
