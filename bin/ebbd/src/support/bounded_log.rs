//! A log that takes at most twice a bound; older messages are dropped.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, fcntl_getfl};

/// Largest size of one file of a log, in bytes.
pub const MOST_BYTES: u64 = 1 << 20;

/// A file that is appended to. When it is full, it is copied to `PATH.1` and begins anew in place,
/// so that `tail -f` goes on.
///
/// It never returns an error: what its file system has no room for is left out.
pub struct BoundedLog {
    path: PathBuf,
    file: Option<File>,
    bounded: bool,
}

impl BoundedLog {
    /// Opens the log at this path, and makes it if there is none.
    pub fn open(path: &Path) -> BoundedLog {
        let mut log = BoundedLog { path: path.into(), file: None, bounded: true };
        log.reopen();
        log
    }

    /// A log on standard error, bounded if that is the file at this path, opened to append.
    pub fn stderr(path: Option<&Path>) -> BoundedLog {
        let stderr = std::io::stderr().as_fd().try_clone_to_owned().map(File::from).ok();
        let place = |file: &File| file.metadata().map(|found| (found.dev(), found.ino())).ok();
        let bounded = stderr.as_ref().zip(path).is_some_and(|(stderr, path)| {
            let named = path.metadata().map(|found| (found.dev(), found.ino())).ok();
            let appends = fcntl_getfl(stderr).is_ok_and(|flags| flags.contains(OFlags::APPEND));
            appends && place(stderr) == named
        });
        BoundedLog { path: path.unwrap_or(Path::new("")).into(), file: stderr, bounded }
    }

    /// Writes as much as there is room for.
    pub fn write(&mut self, bytes: &[u8]) {
        if self.file.is_none() {
            self.reopen();
        }
        let bytes = match self.bounded {
            true => &bytes[bytes.len().saturating_sub(MOST_BYTES as usize)..],
            false => bytes,
        };
        if self.bounded && self.bytes() + bytes.len() as u64 > MOST_BYTES {
            self.begin_anew();
        }
        if let Some(file) = &mut self.file {
            // Nobody could be told of an error.
            let _ = file.write_all(bytes);
        }
    }

    fn bytes(&self) -> u64 {
        { self.file.as_ref() }.and_then(|file| file.metadata().ok()).map_or(0, |found| found.len())
    }

    fn reopen(&mut self) {
        self.file = File::options().append(true).create(true).mode(0o600).open(&self.path).ok();
    }

    fn begin_anew(&mut self) {
        let Some(file) = &self.file else { return };
        let before = before(&self.path);
        if fs::copy(&self.path, &before).is_err() {
            // A partial copy is worth less than its room.
            let _ = fs::remove_file(&before);
        }
        let _ = file.set_len(0);
    }
}

/// Path of the previous file of the log.
fn before(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_the_end_of_what_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.log");
        let mut log = BoundedLog::open(&path);
        let line = |number: u64| format!("{number:0>99}\n");
        let count = 5 * MOST_BYTES / 100;
        (0..count).for_each(|number| log.write(line(number).as_bytes()));
        let (now, old) = (fs::read(&path).unwrap(), fs::read(before(&path)).unwrap());
        assert!(now.len() as u64 <= MOST_BYTES && old.len() as u64 <= MOST_BYTES);
        let kept = String::from_utf8([old, now].concat()).unwrap();
        let first = count - kept.lines().count() as u64;
        assert!(first < count - MOST_BYTES / 100);
        assert_eq!(kept, (first..count).map(line).collect::<String>());
        log.write(&vec![b'x'; 3 * MOST_BYTES as usize]);
        assert_eq!(path.metadata().unwrap().len(), MOST_BYTES);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_directory_that_comes_late_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("later/a.log");
        let mut log = BoundedLog::open(&path);
        log.write(b"lost\n");
        fs::create_dir(path.parent().unwrap()).unwrap();
        log.write(b"kept\n");
        assert_eq!(fs::read(&path).unwrap(), b"kept\n");
    }
}
