//! The socket at which front ends connect.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Nobody can connect.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Somebody answers there.
    #[error("{}: another process serves a device at this socket", .0.display())]
    InUse(PathBuf),
    /// The socket, or what is beside it.
    #[error("{}: {error}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// What went wrong.
        #[source]
        error: io::Error,
    },
}

/// Listens at `path`, without waiting in accept(2). A socket file that a dead process left
/// is removed first.
///
/// # Errors
/// The socket is in use, or cannot be made.
pub fn listen(path: &Path) -> Result<UnixListener, SocketError> {
    let failed = |error| SocketError::Io { path: path.into(), error };
    match UnixStream::connect(path) {
        Ok(_) => return Err(SocketError::InUse(path.into())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)?;
        }
        // Whatever else is the matter, binding tells it better.
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_one_processs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = listen(&path).unwrap();
        assert!(matches!(listen(&path).unwrap_err(), SocketError::InUse(_)));
        drop(listener);
        listen(&path).unwrap();
        let beyond = directory.path().join("none").join("socket");
        assert!(matches!(listen(&beyond).unwrap_err(), SocketError::Io { .. }));
    }
}
