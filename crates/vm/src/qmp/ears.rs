//! Hearing of a reset from a thread that does not have the connection.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Acquire;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Tells whether QEMU may have reported a reset since this was made.
///
/// QEMU writes the event to the socket before the vCPUs go on. So as long as the socket is empty and
/// no reset was read from it, no vCPU has run after a reset.
pub struct Ears {
    stream: UnixStream,
    resets: Arc<AtomicU64>,
    before: u64,
}

impl Ears {
    pub(super) fn new(stream: UnixStream, resets: Arc<AtomicU64>) -> Ears {
        let before = resets.load(Acquire);
        Ears { stream, resets, before }
    }

    /// Whether a reset was read, or something on the socket was not read yet. `true` also once the
    /// connection is closed. Never waits.
    pub fn may_have_heard_reset(&self) -> bool {
        // First the socket: what another thread reads meanwhile is in the count.
        let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
        let polled = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled != Ok(0) || self.resets.load(Acquire) != self.before
    }
}
