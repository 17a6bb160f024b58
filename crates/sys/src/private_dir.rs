//! Directories in which nobody else can put anything.
//!
//! Files there are opened by name. A link, or a file of another user, would be followed and written
//! to as root.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, OFlags, accessat};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::user_namespace::UserNamespace;

/// The owner of what belongs to nobody in this user namespace, unless the host sets another number.
const OVERFLOW_USER: u32 = 65534;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Why a directory is not used.
#[derive(Debug)]
pub enum PrivateDirError {
    /// It cannot be made, opened or written.
    Io(PathBuf, io::Error),
    /// A link, a file or the like has its name.
    NoDirectory(PathBuf),
    /// It belongs to another user: this one.
    Owner(PathBuf, u32),
    /// Others can write it. These are its permissions.
    Mode(PathBuf, u32),
}

impl PrivateDirError {
    /// Says what is wrong.
    pub fn why(&self) -> String {
        match self {
            Self::Io(path, error) => format!("{}: {error}", path.display()),
            Self::NoDirectory(path) => {
                format!("{} is a symbolic link, or no directory", path.display())
            }
            Self::Owner(path, uid) => {
                format!("{} belongs to user {uid}, who can exchange what is in it", path.display())
            }
            Self::Mode(path, mode) => {
                format!("{} can be written by others (mode {mode:04o})", path.display())
            }
        }
    }

    /// Says what to do. `None`: the error says enough.
    pub fn advice(&self) -> Option<String> {
        match self {
            Self::Io(_, error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                Some("name a directory on a file system that can be written".into())
            }
            Self::Io(..) => None,
            Self::NoDirectory(_) => Some("remove it, or name the directory itself".into()),
            Self::Owner(_, OVERFLOW_USER) if !is_host() => Some(
                "that user is not in this user namespace: run it on the host, or name another \
                 directory"
                    .into(),
            ),
            // This user cannot change what belongs to root.
            Self::Owner(_, 0) => Some("run it as root, or name another directory".into()),
            Self::Owner(path, _) => Some(format!(
                "give it to user {1} (`chown {1} {0}`) once you know what is in it, or name \
                 another directory",
                path.display(),
                geteuid().as_raw()
            )),
            Self::Mode(path, _) => Some(format!(
                "take that from them (`chmod go-w {}`) once you know what is in it, or name \
                 another directory",
                path.display()
            )),
        }
    }
}

impl std::fmt::Display for PrivateDirError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.why())?;
        self.advice().map_or(Ok(()), |advice| write!(f, ": {advice}"))
    }
}

impl std::error::Error for PrivateDirError {}

/// Makes the directory for this user alone if there is none, and checks that only this user can put
/// anything into it.
///
/// # Errors
/// It belongs to another user, or others can write it. One line says what to do.
pub fn make(path: &Path) -> Result<(), PrivateDirError> {
    // If something is there already, the check below shows what it is.
    match DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(PrivateDirError::Io(path.into(), error))
        }
        _ => check(path).map(drop),
    }
}

/// Checks that this user can put something into the directory, and nobody else. Returns its
/// metadata.
///
/// # Errors
/// As [`make`], or there is no such directory.
pub fn check(path: &Path) -> Result<Metadata, PrivateDirError> {
    use PrivateDirError::{Io, Mode, NoDirectory, Owner};
    let metadata = open(path).and_then(|directory| directory.metadata());
    let metadata =
        metadata.map_err(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::LOOP | Errno::NOTDIR) => NoDirectory(path.into()),
            _ => Io(path.into(), error),
        })?;
    match (metadata.uid(), metadata.mode() & 0o7777) {
        (uid, _) if uid != geteuid().as_raw() => Err(Owner(path.into(), uid)),
        (_, mode) if mode & WRITABLE_BY_OTHERS != 0 => Err(Mode(path.into(), mode)),
        _ => may_write(path).map(|()| metadata),
    }
}

/// Checks that a directory that does not exist could be made.
///
/// # Errors
/// The nearest directory above it cannot be written.
pub fn check_missing(path: &Path) -> Result<(), PrivateDirError> {
    may_write(nearest(path))
}

/// Returns the path itself, or the nearest directory above it that exists.
pub fn nearest(path: &Path) -> &Path {
    path.ancestors().find(|above| above.exists()).unwrap_or(Path::new("/"))
}

fn may_write(path: &Path) -> Result<(), PrivateDirError> {
    let error = |error: Errno| PrivateDirError::Io(path.into(), error.into());
    // By the effective user, as for the writes to come.
    accessat(CWD, path, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).map_err(error)
}

fn is_host() -> bool {
    UserNamespace::own().is_ok_and(|namespace| namespace.is_whole())
}

/// Opens a directory. Does not follow a link.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn only_what_is_ours_alone_is_used() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("beyond").join("run");
        make(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        make(&path).unwrap();
        for mode in [0o777, 0o720, 0o1702] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert!(matches!(make(&path), Err(PrivateDirError::Mode(_, found)) if found == mode));
        }
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        make(&path).unwrap();
        // Only root can give it to another user.
        if chown(&path, Some(12345), None).is_ok() {
            let why = make(&path).unwrap_err().to_string();
            assert!(why.contains("user 12345") && !why.contains('\n'), "{why}");
        }
    }

    #[test]
    fn a_link_is_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let (target, link, file) =
            (base.path().join("target"), base.path().join("link"), base.path().join("file"));
        make(&target).unwrap();
        symlink(&target, &link).unwrap();
        fs::write(&file, "").unwrap();
        for path in [link, file] {
            assert!(matches!(make(&path), Err(PrivateDirError::NoDirectory(_))), "{path:?}");
        }
    }
}
