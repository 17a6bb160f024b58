//! Files with secrets: tokens, and the keys of certificates.
//!
//! A secret that others can read is none, and one that others can write is theirs.

use std::fs::{Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::process::geteuid;

const OF_OTHERS: u32 = 0o077;

/// Why a file is not used.
#[derive(Debug)]
pub enum PrivateFileError {
    /// It cannot be opened or read.
    Io(PathBuf, io::Error),
    /// A directory, a pipe or the like has its name.
    NoFile(PathBuf),
    /// It belongs to another user: this one.
    Owner(PathBuf, u32),
    /// Others can read or write it. These are its permissions.
    Mode(PathBuf, u32),
    /// It has more than this many bytes.
    TooLarge(PathBuf, u64),
}

impl std::fmt::Display for PrivateFileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Self::NoFile(path) => write!(f, "{} is no file", path.display()),
            Self::Owner(path, uid) => write!(
                f,
                "{0} belongs to user {uid}, who can read and change it: give it to user {1} \
                 (`chown {1} {0}`), or name a copy",
                path.display(),
                geteuid().as_raw()
            ),
            Self::Mode(path, mode) => write!(
                f,
                "{0} can be read or written by others (mode {mode:04o}): take that from them \
                 (`chmod go= {0}`), or name a copy",
                path.display()
            ),
            Self::TooLarge(path, most_bytes) => {
                write!(f, "{} is longer than {most_bytes} bytes: name another", path.display())
            }
        }
    }
}

impl std::error::Error for PrivateFileError {}

/// Reads a file of at most `most_bytes` that belongs to this user or to root, and that nobody else
/// can read or write. Follows links: certificates and their keys often are behind some.
///
/// # Errors
/// The file is something else. One line says what to do.
pub fn read(path: &Path, most_bytes: u64) -> Result<Vec<u8>, PrivateFileError> {
    let io = |error| PrivateFileError::Io(path.into(), error);
    // Without the first flag, opening a pipe waits for its writer.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(flags.bits() as i32).open(path).map_err(io)?;
    check(path, &file.metadata().map_err(io)?)?;
    let mut content = Vec::new();
    file.take(most_bytes.saturating_add(1)).read_to_end(&mut content).map_err(io)?;
    match content.len() as u64 > most_bytes {
        true => Err(PrivateFileError::TooLarge(path.into(), most_bytes)),
        false => Ok(content),
    }
}

fn check(path: &Path, metadata: &Metadata) -> Result<(), PrivateFileError> {
    let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    match () {
        () if !metadata.is_file() => Err(PrivateFileError::NoFile(path.into())),
        () if uid != 0 && uid != geteuid().as_raw() => {
            Err(PrivateFileError::Owner(path.into(), uid))
        }
        () if mode & OF_OTHERS != 0 => Err(PrivateFileError::Mode(path.into(), mode)),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn only_what_nobody_else_reads_is_read() {
        let base = tempfile::tempdir().unwrap();
        let (path, link) = (base.path().join("tokens"), base.path().join("link"));
        fs::write(&path, "secret").unwrap();
        symlink(&path, &link).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o602, 0o777] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let why = read(&link, 6).unwrap_err();
            assert!(matches!(why, PrivateFileError::Mode(_, found) if found == mode), "{why}");
            assert!(why.to_string().contains("chmod go= ") && !why.to_string().contains('\n'));
        }
        for mode in [0o600, 0o400] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(read(&link, 6).unwrap(), b"secret");
        }
        assert!(matches!(read(&path, 5), Err(PrivateFileError::TooLarge(_, 5))));
        // Only root can give it to another user, and can read it then.
        if chown(&path, Some(12345), None).is_ok() {
            let why = read(&path, 6).unwrap_err().to_string();
            assert!(why.contains("user 12345") && !why.contains('\n'), "{why}");
        }
    }

    #[test]
    fn what_is_no_file_is_not_waited_for() {
        let base = tempfile::tempdir().unwrap();
        let pipe = base.path().join("pipe");
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        );
        made.unwrap();
        for path in [pipe.as_path(), base.path()] {
            assert!(matches!(read(path, 6), Err(PrivateFileError::NoFile(_))), "{path:?}");
        }
        assert!(matches!(read(&base.path().join("x"), 6), Err(PrivateFileError::Io(..))));
    }
}
