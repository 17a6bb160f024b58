//! The socket at which front ends connect.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use thiserror::Error;

/// Pause after an accept(2) that failed.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Why nobody can connect.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Another process answers there.
    #[error("{}: another process serves a device at this socket", .0.display())]
    InUse(PathBuf),
    /// Another kind of file has this name, and may belong to somebody.
    #[error("{}: this is no socket, and it is kept: remove it, or give another path", .0.display())]
    NoSocket(PathBuf),
    /// An operation on the socket, or on a file beside it, failed.
    #[error("{}: {error}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The error.
        #[source]
        error: io::Error,
    },
}

/// Makes a listener at `path` whose accept(2) does not wait. It first removes a socket file that a
/// dead process left, and nothing else.
///
/// # Errors
/// The socket is in use, another kind of file has its name, or it cannot be made.
pub fn listen(path: &Path) -> Result<UnixListener, SocketError> {
    let failed = |error| SocketError::Io { path: path.into(), error };
    // connect(2) also refuses a file that is no socket, and it follows links.
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(SocketError::NoSocket(path.into()));
        }
        _ => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => return Err(SocketError::InUse(path.into())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)?;
        }
        // For all other errors, bind(2) gives the better message.
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Handles a failed accept(2). It returns at once if nobody wanted to connect. Otherwise it pauses:
/// a front end stays in the queue, and accept(2) fails at once again, as with no descriptor left.
pub fn tired(error: &io::Error) {
    if error.kind() != io::ErrorKind::WouldBlock {
        tracing::warn!("a front end cannot be accepted: {error}");
        thread::sleep(TRY_AGAIN_AFTER);
    }
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

    #[test]
    fn a_file_that_is_no_socket_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        fs::write(&file, "a user's").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link, &directory.path().to_owned()] {
            assert!(matches!(listen(path).unwrap_err(), SocketError::NoSocket(_)));
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "a user's");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        // A link to a socket that nobody listens at is kept too.
        fs::remove_file(&file).unwrap();
        drop(UnixListener::bind(&file).unwrap());
        assert!(matches!(listen(&link).unwrap_err(), SocketError::NoSocket(_)));
        listen(&file).unwrap();
    }
}
