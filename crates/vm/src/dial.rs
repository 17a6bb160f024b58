//! Connecting to a UNIX socket without waiting for its owner for ever.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Nothing tells when an owner that is slow to accept has room again.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Connects until `deadline`, and tries at least once. The stream blocks.
///
/// # Errors
/// `ConnectionRefused`: nobody listens; `WouldBlock`: as many wait already as the owner lets
/// wait; as socket(2) and connect(2).
pub fn dial(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let address = SocketAddrUnix::new(path)?;
    loop {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                thread::sleep(LOOK_EVERY);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;

    #[test]
    fn an_owner_that_accepts_nobody_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // Room for one that waits.
        rustix::net::listen(listener.as_fd(), 0).unwrap();
        let first = dial(&path, Instant::now()).unwrap();
        // A connect(2) that blocks would never return.
        let second = dial(&path, Instant::now() + Duration::from_millis(20));
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let accepted = listener.accept().unwrap();
        dial(&path, Instant::now()).unwrap();
        drop((first, accepted, listener));
        let refused = dial(&path, Instant::now()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
