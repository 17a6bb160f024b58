//! Connecting to a UNIX socket with a deadline.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Time between two tries. Nothing tells when a slow owner has room for another connection.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Connects until `deadline`, and tries at least once. The stream is blocking.
///
/// # Errors
/// `ConnectionRefused` if nobody listens; `WouldBlock` if the queue of connections is full; as
/// socket(2) and connect(2).
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

/// State of a connection to an owner that serves one client at a time, as QEMU's monitors do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// The owner has accepted this connection.
    Accepted,
    /// The owner has accepted nobody: it is busy.
    Next,
    /// The owner has accepted a connection, and one waits.
    Behind,
}

/// Returns the state of this connection. The kernel tells connections apart by the owner's path
/// alone, so another socket with the same path can be mistaken for this one. It lists a connection
/// in the client's network namespace: this one in ours, others in ours or in the owner's, as
/// libvirt's in a container.
///
/// # Errors
/// As getpeername(2) and reading `/proc/net/unix`.
pub(crate) fn turn(stream: &UnixStream) -> io::Result<Turn> {
    /// `SS_CONNECTING` and `SS_CONNECTED` of `include/uapi/linux/net.h`.
    const STATES: [&[u8]; 2] = [b"02", b"03"];
    let peer = stream.peer_addr()?;
    let path = peer.as_pathname().map(|path| path.as_os_str().as_bytes());
    let mut seen = STATES.map(|_| false);
    let own = BufReader::new(File::open("/proc/self/net/unix")?).split(b'\n');
    let owner = rustix::net::sockopt::socket_peercred(stream)?.pid.as_raw_pid();
    // An owner that has ended since, or must not be inspected, has no others.
    let others = File::open(format!("/proc/{owner}/net/unix")).into_iter();
    let others = others.flat_map(|file| BufReader::new(file).split(b'\n').map_while(Result::ok));
    for line in own.chain(others.map(Ok)) {
        let Some(row) = UnixSocket::parse(&line?) else { continue };
        if Some(row.path.as_os_str().as_bytes()) == path {
            let is_in = STATES.map(|state| row.state == state);
            seen.iter_mut().zip(is_in).for_each(|(seen, is_in)| *seen |= is_in);
        }
    }
    Ok(match seen {
        [false, _] => Turn::Accepted,
        [true, false] => Turn::Next,
        [true, true] => Turn::Behind,
    })
}

/// Whether a client is connected to this socket of a process, as the network namespace of the
/// process shows it. `false` if that cannot be read.
pub(crate) fn has_client(pid: i32, path: &Path) -> bool {
    /// `SS_CONNECTED` of `include/uapi/linux/net.h`.
    const CONNECTED: &[u8] = b"03";
    let Ok(file) = File::open(format!("/proc/{pid}/net/unix")) else { return false };
    let rows = BufReader::new(file).split(b'\n').map_while(Result::ok);
    // The kernel lists a relative path as it was bound.
    rows.filter_map(|row| UnixSocket::parse(&row))
        .any(|row| row.state == CONNECTED && path.ends_with(&row.path))
}

/// Whether somebody listens on this path in this process's network namespace.
pub(crate) fn is_listening(path: &Path) -> bool {
    /// `SS_UNCONNECTED` of `include/uapi/linux/net.h`.
    const UNCONNECTED: &[u8] = b"01";
    let Ok(file) = File::open("/proc/self/net/unix") else { return false };
    let rows = BufReader::new(file).split(b'\n').map_while(Result::ok);
    rows.filter_map(|row| UnixSocket::parse(&row))
        .any(|row| row.state == UNCONNECTED && row.path == path)
}

/// A socket with a path, as `/proc/net/unix` lists it.
pub(crate) struct UnixSocket {
    pub state: Vec<u8>,
    pub inode: Vec<u8>,
    pub path: PathBuf,
}

impl UnixSocket {
    /// Parses `ffff8881: 00000002 00000000 00010000 0001 01 61536 /run/qmp.sock`. Numbers are
    /// padded with spaces. One space follows the inode, and then the path as it is.
    pub(crate) fn parse(line: &[u8]) -> Option<UnixSocket> {
        let mut rest = line;
        let mut words = [&line[..0]; 7];
        for word in &mut words {
            rest = rest.trim_ascii_start();
            (*word, rest) = rest.split_at(rest.iter().position(|&byte| byte == b' ')?);
        }
        let [.., state, inode] = words.map(<[u8]>::to_vec);
        let path = OsStr::from_bytes(rest.get(1..)?).into();
        Some(UnixSocket { state, inode, path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};

    /// Waits until this holds. A process that another test starts has this test's sockets, too,
    /// until it executes its program.
    fn wait_until(holds: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(Instant::now() < end, "the sockets that this test closed are still open");
            thread::sleep(LOOK_EVERY);
        }
    }

    #[test]
    fn a_client_is_seen_without_connecting() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let has = || has_client(std::process::id() as i32, &path);
        assert!(!has());
        let client = UnixStream::connect(&path).unwrap();
        let accepted = listener.accept().unwrap();
        assert!(has() && is_listening(&path));
        drop((client, accepted));
        wait_until(|| !has());
        assert!(is_listening(&path));
        drop(listener);
        wait_until(|| !is_listening(&path));
    }

    #[test]
    fn an_owner_that_accepts_no_connection_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // Room for one connection that waits.
        rustix::net::listen(listener.as_fd(), 0).unwrap();
        let first = dial(&path, Instant::now()).unwrap();
        // A connect(2) that blocks would never return.
        let second = dial(&path, Instant::now() + Duration::from_millis(20));
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let accepted = listener.accept().unwrap();
        dial(&path, Instant::now()).unwrap();
        drop((first, accepted, listener));
        wait_until(|| {
            let tried = dial(&path, Instant::now());
            tried.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        });
    }

    /// Serves a first client of its own at the path in `NAMESPACE_TEST`, until its input ends.
    #[test]
    #[ignore = "the other side of the next test"]
    fn an_owner_with_a_client() {
        let Some(path) = std::env::var_os("NAMESPACE_TEST") else { return };
        let listener = UnixListener::bind(&path).unwrap();
        let _first = dial(Path::new(&path), Instant::now()).unwrap();
        let _accepted = listener.accept().unwrap();
        println!("accepted");
        io::copy(&mut io::stdin(), &mut io::sink()).unwrap();
    }

    #[test]
    fn a_client_in_another_network_namespace_counts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let mut owner = Command::new("unshare")
            .args(["--map-root-user", "--net"])
            .arg(std::env::current_exe().unwrap())
            .args(["--ignored", "--nocapture", "--exact", "dial::tests::an_owner_with_a_client"])
            .env("NAMESPACE_TEST", &path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(owner.stdout.take().unwrap()).lines();
        let mut said = said.map_while(Result::ok);
        let is_ready = said.any(|line| line.contains("accepted"));
        assert!(is_ready, "{:?}", owner.wait());
        let stream = dial(&path, Instant::now()).unwrap();
        let turn = turn(&stream);
        drop(owner.stdin.take());
        owner.wait().unwrap();
        assert_eq!(turn.unwrap(), Turn::Behind);
    }

    #[test]
    fn a_client_knows_whose_turn_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a socket");
        let listener = UnixListener::bind(&path).unwrap();
        let first = dial(&path, Instant::now()).unwrap();
        assert_eq!(turn(&first).unwrap(), Turn::Next);
        let accepted = listener.accept().unwrap();
        assert_eq!(turn(&first).unwrap(), Turn::Accepted);
        let second = dial(&path, Instant::now()).unwrap();
        assert_eq!(turn(&second).unwrap(), Turn::Behind);
        drop((first, accepted));
        let _accepted = listener.accept().unwrap();
        assert_eq!(turn(&second).unwrap(), Turn::Accepted);
    }
}
