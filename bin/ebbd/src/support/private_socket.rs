//! A Unix socket that nobody but this process's user may connect to.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use super::state_file::remove_if_there;

/// Listens at a path in a directory of this user's, in place of a socket that an ended process left
/// there. The listener does not block. `unbound` maps an error of bind(2).
///
/// # Errors
/// Those of unlink(2), bind(2) and chmod(2).
pub fn listen<E: From<io::Error>>(
    path: &Path,
    unbound: impl FnOnce(io::Error) -> E,
) -> Result<UnixListener, E> {
    remove_if_there(path)?;
    // Nobody else gets into the directory, so the socket is at no moment open to others.
    let listener = UnixListener::bind(path).map_err(unbound)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
