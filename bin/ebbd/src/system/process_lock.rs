//! The lock of a VM's process on the VM's directory. It has the process's number in it. So `ebbd`
//! finds the processes that an earlier one started, and no VM ever has two.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ebb_sys::process::Process;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

const FILE: &str = "process.lock";
/// Longest wait for the lock. A killed process has its lock until the kernel has torn it down.
const DEATH_LIMIT: Duration = Duration::from_secs(30);
/// Longest wait for the number in the lock. A process writes it as soon as it has the lock.
const WORD_LIMIT: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Takes the lock, which the returned file has.
///
/// # Errors
/// Those of open(2). `WouldBlock`: another process has it. `NotFound`: the directory was removed
/// meanwhile.
pub fn take(directory: &Path, now: Instant) -> io::Result<File> {
    let lock = open(directory, true)?;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::WOULDBLOCK) if now.elapsed() < DEATH_LIMIT => thread::sleep(LOOK_EVERY),
            Err(error) => return Err(error.into()),
        }
    }
    let (own, named) = (lock.metadata()?, fs::metadata(path(directory))?);
    if (own.dev(), own.ino()) != (named.dev(), named.ino()) {
        return Err(io::ErrorKind::NotFound.into());
    }
    let own = Process::own()?;
    let word = format!("{} {}\n", own.pid(), own.start_ticks()?);
    // Overwrites the previous number: that needs no new room.
    lock.write_all_at(word.as_bytes(), 0)?;
    lock.set_len(word.len() as u64)?;
    Ok(lock)
}

/// The process that has the lock; none: nobody has it.
///
/// # Errors
/// Those of open(2). `InvalidData`: the process does not tell its number.
pub fn holder(directory: &Path) -> io::Result<Option<Process>> {
    let lock = match open(directory, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        lock => lock?,
    };
    let began = Instant::now();
    while is_taken(&lock)? {
        if let Some(process) = named(&fs::read_to_string(path(directory))?) {
            return Ok(Some(process));
        }
        if began.elapsed() > WORD_LIMIT {
            let why = "its process does not tell its number";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(None)
}

/// The process with this number and start time; none: it does not exist, so the number is of one
/// that has ended.
fn named(word: &str) -> Option<Process> {
    let (pid, ticks) = word.trim().split_once(' ')?;
    let process = Process::open(pid.parse().ok()?).ok()?;
    (process.start_ticks().ok()? == ticks.parse::<u64>().ok()?).then_some(process)
}

fn path(directory: &Path) -> PathBuf {
    directory.join(FILE)
}

fn open(directory: &Path, makes: bool) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(makes).create(makes).mode(0o600).open(path(directory))
}

fn is_taken(lock: &File) -> io::Result<bool> {
    match flock(lock, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(flock(lock, FlockOperation::Unlock).map(|()| false)?),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_the_lock_is_known_until_it_ends() {
        let directory = tempfile::tempdir().unwrap();
        assert!(holder(directory.path()).unwrap().is_none());
        let lock = take(directory.path(), Instant::now()).unwrap();
        let found = holder(directory.path()).unwrap().map(|process| process.pid());
        assert_eq!(found, Some(std::process::id() as i32));
        drop(lock);
        // A process that another test starts has the file, too, until it executes its program.
        testkit::until("nobody to have the lock", || {
            holder(directory.path()).unwrap().is_none().then_some(())
        });
    }

    #[test]
    fn a_word_of_a_process_that_ended_names_nobody() {
        let own = Process::own().unwrap();
        let ticks = own.start_ticks().unwrap();
        assert!(named(&format!("{} {ticks}\n", own.pid())).is_some());
        assert!(named(&format!("{} {}\n", own.pid(), ticks + 1)).is_none());
        assert!(named("").is_none() && named("1").is_none() && named("x y").is_none());
    }

    #[test]
    fn a_directory_that_was_removed_gives_no_lock() {
        let directory = tempfile::tempdir().unwrap();
        let first = take(directory.path(), Instant::now()).unwrap();
        let file = path(&directory.path().canonicalize().unwrap());
        thread::scope(|scope| {
            let second = scope.spawn(|| take(directory.path(), Instant::now()));
            testkit::until("both to have the file open", || {
                let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
                let links = open.filter_map(|entry| fs::read_link(entry.path()).ok());
                (links.filter(|link| *link == file).count() == 2).then_some(())
            });
            fs::remove_file(&file).unwrap();
            drop(first);
            assert!(second.join().unwrap().is_err());
        });
    }
}
