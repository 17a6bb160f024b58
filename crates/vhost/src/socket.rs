//! The socket at which front ends connect.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use thiserror::Error;

/// So long nobody is taken after one could not be.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Nobody can connect.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Somebody answers there.
    #[error("{}: another process serves a device at this socket", .0.display())]
    InUse(PathBuf),
    /// Something else has this name, and it may be somebody's file.
    #[error("{}: this is no socket, and it is kept: remove it, or give another path", .0.display())]
    NoSocket(PathBuf),
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
/// is removed first, and nothing else.
///
/// # Errors
/// The socket is in use, its name is that of another file, or it cannot be made.
pub fn listen(path: &Path) -> Result<UnixListener, SocketError> {
    let failed = |error| SocketError::Io { path: path.into(), error };
    // connect(2) also refuses what is no socket, and it follows links.
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
        // Whatever else is the matter, binding tells it better.
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// After an accept(2) that failed: goes on at once where nobody was there. Else, as where there are no descriptors left, who
/// waits stays, and would be met again and again.
pub fn tired(error: &io::Error) {
    if error.kind() != io::ErrorKind::WouldBlock {
        tracing::warn!("a front end cannot be taken: {error}");
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
    fn what_is_no_socket_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        fs::write(&file, "a user's").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link, &directory.path().to_owned()] {
            assert!(matches!(listen(path).unwrap_err(), SocketError::NoSocket(_)));
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "a user's");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        // Nor a link to a socket that nobody listens at.
        fs::remove_file(&file).unwrap();
        drop(UnixListener::bind(&file).unwrap());
        assert!(matches!(listen(&link).unwrap_err(), SocketError::NoSocket(_)));
        listen(&file).unwrap();
    }
}
