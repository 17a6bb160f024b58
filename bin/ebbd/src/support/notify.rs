//! Tells systemd that the daemon is ready (sd_notify(3)).

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Names the socket on which systemd waits for that.
const VARIABLE: &str = "NOTIFY_SOCKET";
const READY: &[u8] = b"READY=1";

/// Tells systemd that clients can connect, if systemd waits for that.
pub fn ready() {
    if let Some(Err(error)) = env::var_os(VARIABLE).map(|socket| send(&socket)) {
        tracing::warn!("systemd does not hear that ebbd is ready: {error}");
    }
}

fn send(socket: &OsStr) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(READY, &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_hears_by_a_path_or_an_abstract_name() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("notify");
        let abstract_name = format!("ebb-notify-{}", std::process::id());
        let by_name = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        for (listener, socket) in [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str().to_owned()),
            (UnixDatagram::bind_addr(&by_name).unwrap(), format!("@{abstract_name}").into()),
        ] {
            send(&socket).unwrap();
            let mut heard = [0; 16];
            let length = listener.recv(&mut heard).unwrap();
            assert_eq!(&heard[..length], READY);
        }
        assert!(send(path.as_os_str()).is_err(), "nobody listens there any more");
    }
}
