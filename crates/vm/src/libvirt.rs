//! QEMU's monitor by way of libvirt, which holds the only one of its VMs. Ebb asks libvirt's daemon,
//! and the daemon asks QEMU. `docs/decisions/0059-libvirts-own-monitor.md`.
//!
//! [`connect`] returns a [`Qmp`] as any other. Behind it a thread (`bridge`) translates between QMP
//! and libvirt's protocol. It passes on an answer only once it has passed on every reset that QEMU
//! reported before. But a reset can come late: see [`Qmp::hears_at_once`]. A refusal of libvirt's is
//! passed on as what it is, and never as QEMU's.

mod bridge;
mod connection;
mod error;
#[cfg(test)]
mod tests;
mod xdr;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::command_line::CommandLine;
use crate::dial::{dial, is_listening};
use crate::qmp::Qmp;

use self::bridge::Bridge;
use self::connection::{Connection, Until};
pub use self::error::LibvirtError;

/// Where libvirt's daemons for QEMU listen: the one for QEMU alone, and the one for all.
const SOCKETS: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];
/// Where libvirt has a file for each domain that runs, with the number of its QEMU.
const STATE: &str = "/run/libvirt/qemu";
/// Most bytes of such a file.
const PID_BYTES: u64 = 16;
/// The member of an answer that says why libvirt has refused a request. QEMU's answers have none.
pub(crate) const REFUSED: &str = "refused-by-libvirt";

/// A domain of libvirt's, and where to ask for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Domain {
    /// The socket of the daemon that runs it.
    pub socket: PathBuf,
    /// Its UUID.
    pub uuid: String,
}

impl Domain {
    /// Why libvirt would not answer: nobody listens on its socket. Asks nobody.
    pub fn is_asked_in_vain(&self) -> Option<LibvirtError> {
        let source = ErrorKind::ConnectionRefused.into();
        let nobody = LibvirtError::Connect { path: self.socket.clone(), source };
        (!is_listening(&self.socket)).then_some(nobody)
    }
}

/// The domain whose QEMU is the process `pid`. `None` if the libvirt of this host does not say so.
/// Asks nobody.
pub fn domain_of(pid: i32, line: &CommandLine) -> Option<Domain> {
    let uuid = line.uuid().filter(|uuid| bytes_of(uuid).is_some())?;
    if qemu_of(Path::new(STATE), &line.name()?) != Some(pid) {
        return None;
    }
    let all = SOCKETS.map(PathBuf::from);
    let socket = all.iter().find(|path| is_listening(path)).or(all.last())?;
    Some(Domain { socket: socket.clone(), uuid })
}

/// Connects to the monitor of the domain's QEMU, which must be the process `pid`.
///
/// # Errors
/// [`LibvirtError`].
pub fn connect(pid: i32, domain: &Domain, most: Duration) -> Result<Qmp, LibvirtError> {
    connect_in(Path::new(STATE), pid, domain, most)
}

/// Same as [`connect`], with libvirt's files in `state`.
fn connect_in(
    state: &Path,
    pid: i32,
    domain: &Domain,
    most: Duration,
) -> Result<Qmp, LibvirtError> {
    let deadline = Instant::now() + most;
    let stream = dial(&domain.socket, deadline)
        .map_err(|source| LibvirtError::Connect { path: domain.socket.clone(), source })?;
    over(stream, state, pid, &domain.uuid, deadline)
}

/// Same as [`connect`] over this connection.
///
/// # Errors
/// [`LibvirtError`].
pub fn over(
    stream: UnixStream,
    state: &Path,
    pid: i32,
    uuid: &str,
    deadline: Instant,
) -> Result<Qmp, LibvirtError> {
    let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(std::io::Error::from)?;
    if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
        return Err(LibvirtError::OtherUser(peer.uid.as_raw()));
    }
    let uuid = bytes_of(uuid).ok_or(LibvirtError::Unsendable("its domain's UUID is none"))?;
    let mut libvirt = Connection::over(stream);
    let until = Until::Time(deadline);
    libvirt.log_in(until)?;
    libvirt.open(until)?;
    let found = libvirt.look_up(&uuid, until)?;
    libvirt.hear_events(&found, until)?;
    let (ours, theirs) = UnixStream::pair()?;
    let bridge = Bridge::new(libvirt, theirs, found, (state.to_owned(), pid));
    bridge.is_of_process()?;
    let ended = Arc::<OnceLock<LibvirtError>>::default();
    let told = Arc::clone(&ended);
    thread::Builder::new().name("libvirt".into()).spawn(move || bridge.run(&told))?;
    Ok(Qmp::by_libvirt(ours, ended))
}

/// The number of a domain's QEMU, as libvirt has written it.
fn qemu_of(state: &Path, name: &str) -> Option<i32> {
    if name.contains('/') {
        return None;
    }
    let mut text = String::new();
    let file = File::open(state.join(format!("{name}.pid"))).ok()?;
    file.take(PID_BYTES).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// The bytes of a UUID in the usual form.
fn bytes_of(uuid: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = uuid.bytes().filter(|&byte| byte != b'-').collect();
    let mut bytes = [0; 16];
    if digits.len() != 2 * bytes.len() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).ok()?;
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    Some(bytes)
}
