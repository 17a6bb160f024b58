//! State files: JSON that outlives a daemon, in files that are whole or absent.
//!
//! Beside each record lies a spare file of its size. The next record is written over the spare, and
//! then the two change places. So a record that does not grow needs no new room, even in a full
//! file system. See `docs/run-directory.md`, *vm.json*.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How often to read a file that cannot be parsed before that is an error.
const READS: u32 = 3;
const BETWEEN_READS: Duration = Duration::from_millis(2);
/// Granularity of a file's room: pages of memory, or blocks of a disk.
const PAGE_BYTES: usize = 4096;
/// Spare room in a record, for settings that are added to it later.
const GROWTH_BYTES: usize = 2048;
/// A spare is cut if it is larger than needed by more than this.
const EXCESS_BYTES: usize = 16 * PAGE_BYTES;

/// Writes the file anew.
///
/// # Errors
/// Those of write(2) and rename(2). If there is no room, the error names the directory and advises
/// to make some. The file is unchanged then.
pub fn save(path: &Path, what: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(what)?;
    let spare = spare(path);
    let was_there = spare.exists();
    let saved = write_over(&spare, text).and_then(|bytes| put_in_place(&spare, path, bytes));
    if saved.is_err() && !was_there {
        // A partly written file is neither a record nor a spare.
        let _ = remove_if_there(&spare);
    }
    saved.map_err(|error| explain(path, error))
}

/// Reads the file; `None`: it does not exist.
///
/// # Errors
/// Those of read(2). `InvalidData`: it cannot be parsed.
pub fn load<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let mut tries = 1;
    loop {
        match load_once(path) {
            // Another process may have written its next version over the file that was opened.
            Err(error) if makes_no_sense(&error) && tries < READS => thread::sleep(BETWEEN_READS),
            loaded => return loaded,
        }
        tries += 1;
    }
}

/// Whether serde_json could not parse the file, which includes a file that ends too early.
fn makes_no_sense(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
}

fn load_once<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a file that only the caller writes. If there is none, a spare is left over from a failed
/// attempt to write one, and is removed.
///
/// # Errors
/// Those of [`load`].
pub fn load_own<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let found = load(path)?;
    if found.is_none() {
        remove(path)?;
    }
    Ok(found)
}

/// Removes the file, and then its spare.
///
/// # Errors
/// Those of unlink(2). It is no error if it does not exist.
pub fn remove(path: &Path) -> io::Result<()> {
    remove_if_there(path)?;
    remove_if_there(&spare(path))
}

fn spare(path: &Path) -> PathBuf {
    path.with_extension("json.next")
}

/// Writes `text` over the spare, and blanks after it up to the end of its room, so that none of the
/// room is given back. Returns the size of the file.
fn write_over(spare: &Path, mut text: Vec<u8>) -> io::Result<usize> {
    let mut file = File::options().write(true).create(true).truncate(false).open(spare)?;
    let has_bytes = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    let least_bytes = text.len().next_multiple_of(PAGE_BYTES);
    let wanted_bytes = (text.len() + GROWTH_BYTES).next_multiple_of(PAGE_BYTES);
    text.resize(has_bytes.clamp(least_bytes, wanted_bytes + EXCESS_BYTES), b' ');
    file.write_all(&text)?;
    file.set_len(text.len() as u64)?;
    // Without room to grow, it is still a valid record.
    let more = wanted_bytes.saturating_sub(text.len());
    match file.write_all(&vec![b' '; more]) {
        Ok(()) => Ok(text.len() + more),
        Err(_) => file.set_len(text.len() as u64).map(|()| text.len()),
    }
}

/// Makes the spare the record. The previous record becomes the spare.
fn put_in_place(spare: &Path, path: &Path, bytes: usize) -> io::Result<()> {
    let has_spare = match renameat_with(CWD, spare, CWD, path, RenameFlags::EXCHANGE) {
        Ok(()) => true,
        // Some file systems cannot exchange two files.
        Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => false,
        Err(error) => return Err(error.into()),
    };
    let is_first = !has_spare && !path.exists();
    if !has_spare {
        fs::rename(spare, path)?;
    }
    match make_spare(spare, bytes) {
        // A record that could not be changed later is not kept.
        Err(error) if is_first => {
            remove(path)?;
            Err(error)
        }
        // The record is valid; the next one may need room.
        _ => Ok(()),
    }
}

/// Makes the spare at least this large.
fn make_spare(spare: &Path, bytes: usize) -> io::Result<()> {
    let mut file = File::options().append(true).create(true).open(spare)?;
    let has_bytes = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    file.write_all(&vec![b' '; bytes.saturating_sub(has_bytes)])
}

/// Removes a file.
///
/// # Errors
/// Those of unlink(2). It is no error if it does not exist.
pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether a file system has no room left, or its quota does not allow more.
pub fn is_no_room(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn explain(path: &Path, error: io::Error) -> io::Error {
    let directory = path.parent().unwrap_or(path).display();
    match is_no_room(&error) {
        true => {
            io::Error::new(error.kind(), format!("no space left in {directory}: make room there"))
        }
        false => error,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// Runs a test of this file again with a tmpfs of 32 KiB mounted. In that run, returns its
    /// directory.
    fn within_small(test: &str) -> Option<PathBuf> {
        testkit::mounted(&format!("support::state_file::tests::{test}"), "size=32k,mode=0700")
    }

    fn fill(directory: &Path) -> PathBuf {
        let path = directory.join("fill");
        let mut file = File::create(&path).unwrap();
        while let Ok(1..) = file.write(&[0x5a; 512]) {}
        path
    }

    fn names(directory: &Path) -> Vec<String> {
        let name =
            |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut all: Vec<String> = fs::read_dir(directory).unwrap().map(name).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn a_full_directory_takes_what_does_not_grow_and_refuses_the_rest() {
        const TEST: &str = "a_full_directory_takes_what_does_not_grow_and_refuses_the_rest";
        let Some(directory) = within_small(TEST) else { return };
        let path = directory.join("a.json");
        let on_record = || load::<Vec<u64>>(&path).unwrap();
        save(&path, &[1]).unwrap();
        let full = fill(&directory);
        for number in [2, 3, u64::MAX] {
            save(&path, &[number; 20]).unwrap();
            assert_eq!(on_record(), Some(vec![number; 20]));
        }
        // A record that finds no room, or that would be the first one, loses nothing either.
        let other = directory.join("b.json");
        for path in [&path, &other] {
            let error = save(path, &vec![7; 2000]).unwrap_err();
            let message = format!("no space left in {}: make room there", directory.display());
            assert_eq!((is_no_room(&error), error.to_string()), (true, message));
        }
        assert_eq!(on_record(), Some(vec![u64::MAX; 20]));
        assert_eq!(names(&directory), ["a.json", "a.json.next", "fill"]);
        save(&path, &[4]).unwrap();
        assert_eq!(on_record(), Some(vec![4]));
        // With room for a record but none for its spare, there is no record.
        fs::remove_file(&full).unwrap();
        let free = File::create(directory.join("free")).unwrap();
        (&free).write_all(&[0; PAGE_BYTES]).unwrap();
        fill(&directory);
        drop(free);
        fs::remove_file(directory.join("free")).unwrap();
        assert!(is_no_room(&save(&other, &[1]).unwrap_err()));
        assert_eq!(names(&directory), ["a.json", "a.json.next", "fill"]);
        remove(&path).unwrap();
        assert_eq!(names(&directory), ["fill"]);
    }

    /// So no room is needed in a full file system.
    #[test]
    fn a_record_takes_the_place_of_the_one_before_the_last() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        let found = |path: &Path| path.metadata().map(|found| (found.ino(), found.len())).unwrap();
        // A file of a daemon that kept no spare.
        fs::write(&path, "[1]").unwrap();
        (0..2).for_each(|number| save(&path, &[number]).unwrap());
        let (last, spared) = (found(&path), found(&spare(&path)));
        assert_eq!(last.1, spared.1);
        save(&path, &vec![2; 100]).unwrap();
        assert_eq!((found(&path), found(&spare(&path))), (spared, last));
        assert_eq!(load::<Vec<u64>>(&path).unwrap(), Some(vec![2; 100]));
        // One record that has grown, and one that has shrunk.
        save(&path, &vec![3; 100_000]).unwrap();
        assert!(found(&spare(&path)).1 >= found(&path).1);
        (0..2).for_each(|number| save(&path, &[number]).unwrap());
        assert!([&path, &spare(&path)].iter().all(|path| found(path).1 < 100_000));
        assert_eq!(load::<Vec<u64>>(&path).unwrap(), Some(vec![1]));
    }

    #[test]
    fn what_an_attempt_has_left_is_removed_at_the_next_start() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        fs::write(spare(&path), "[1").unwrap();
        assert_eq!(load_own::<Vec<u64>>(&path).unwrap(), None);
        assert!(names(directory.path()).is_empty());
        save(&path, &[1]).unwrap();
        assert_eq!(load_own::<Vec<u64>>(&path).unwrap(), Some(vec![1]));
        assert_eq!(names(directory.path()), ["a.json", "a.json.next"]);
    }
}
