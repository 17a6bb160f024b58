//! A front end and a back-end that send anything to the relay between them: `who, kind, flags,
//! bytes` and that many bytes for each message. The relay ends with its front end.

use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

use ebb_vhost::{Parted, relay};

use crate::vhost_user::{Memory, say};

const MEMORY: Memory = Memory { bytes: 64 << 10, address: 1 << 20, second_bytes: 64 << 10 };
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs one input.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let (front, device) = (directory.path().join("front"), directory.path().join("device"));
    let listener = UnixListener::bind(&front).expect("a socket");
    let devices = UnixListener::bind(&device).expect("a socket");
    devices.set_nonblocking(true).expect("a socket");
    thread::scope(|scope| {
        let relayed = scope.spawn(|| relay::run_once(&listener, &device, PATIENCE));
        let front_end = UnixStream::connect(&front).expect("it listens");
        talk(&front_end, &devices, data);
        drop(front_end);
        let ended = relayed.join().expect("no panic").expect("it was connected to");
        assert!(!matches!(ended, Parted::Request(_)), "{ended}");
    });
}

fn talk(front_end: &UnixStream, devices: &UnixListener, data: &[u8]) {
    let (mut back_end, mut rest) = (None, data);
    while let [who, kind, flags, count, more @ ..] = rest {
        let (body, after) = more.split_at(usize::from(*count).min(more.len()));
        rest = after;
        let message = (u32::from(kind % 48), *flags);
        match who % 4 {
            // The back-end dies.
            0 => back_end = None,
            1 => {
                back_end = back_end.or_else(|| devices.accept().ok().map(|(stream, _)| stream));
                let say = |stream: &UnixStream| say(stream, message, body, &[], &MEMORY);
                back_end = back_end.filter(say);
            }
            _ => {
                if !say(front_end, message, body, &[], &MEMORY) {
                    return;
                }
            }
        }
    }
}
