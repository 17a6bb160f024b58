//! Where a device's state is kept, so that its process may die.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use thiserror::Error;

use crate::geometry::{Geometry, GeometryError};
use crate::saved::{BYTES_MAX, Saved, SavedError};

/// Keeps the state of a device.
pub trait Record: Send {
    /// Keeps `state`: from the return on, the next process starts with this state. If the process
    /// dies before the return, the next one starts with this state or the one before.
    ///
    /// # Errors
    /// The next process may start with either state. The device stops.
    fn keep(&mut self, state: &Saved) -> io::Result<()>;
}

/// No record: for a device that lives and dies with its VM.
#[derive(Clone, Copy, Default, Debug)]
pub struct NotSaved;

impl Record for NotSaved {
    fn keep(&mut self, _: &Saved) -> io::Result<()> {
        Ok(())
    }
}

/// Why a state file cannot be had.
#[derive(Debug, Error)]
pub enum StateFileError {
    /// The file system returned an error.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// Another process serves the device.
    #[error("{}: another process serves this device", .0.display())]
    InUse(PathBuf),
    /// Neither of the file's two places has a state.
    #[error("{}: {error}", path.display())]
    Unusable {
        /// Path of the file.
        path: PathBuf,
        /// Why the content is no state.
        #[source]
        error: SavedError,
    },
    /// The VM was started with another region than before.
    #[error("{}: state of a device with another region: {found:?}", path.display())]
    Region {
        /// Path of the file.
        path: PathBuf,
        /// The region in the file.
        found: Geometry,
    },
    /// No device can have this region.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}

const PAGE_BYTES: usize = 4096;

/// State in a file that outlives the process, but not the host: it is on tmpfs, with the VM's other
/// records. It is locked while it is open.
#[derive(Debug)]
pub struct StateFile {
    file: File,
    /// Size of each of the file's two places, which are written in turn.
    place_bytes: usize,
    sequence: u64,
}

impl StateFile {
    /// Opens the file and returns the device's last state. If there is no file, creates it with the
    /// state of a new device.
    ///
    /// # Errors
    /// Those of [`StateFile::open`] and [`StateFile::create`], or the file is of another region.
    pub fn open_or_create(
        path: &Path,
        geometry: Geometry,
    ) -> Result<(StateFile, Saved), StateFileError> {
        let new = Saved::new(geometry)?;
        match StateFile::open(path)? {
            None => Ok((StateFile::create(path, &new)?, new)),
            Some((_, state)) if state.geometry() != geometry => {
                Err(StateFileError::Region { path: path.into(), found: state.geometry() })
            }
            Some(found) => Ok(found),
        }
    }

    /// Creates the file of a new device, or replaces the one that is there.
    ///
    /// # Errors
    /// Those of open(2), write(2) and rename(2), or another process has the old file.
    pub fn create(path: &Path, state: &Saved) -> Result<StateFile, StateFileError> {
        let made = || -> io::Result<StateFile> {
            let mut new = path.as_os_str().to_owned();
            new.push(".new");
            let new = PathBuf::from(new);
            let mut options = File::options();
            // A process that has the old file open keeps it, and this fails.
            let _old = File::open(path).ok().map(|old| lock(&old).map(|()| old)).transpose()?;
            let file = { options.read(true).write(true).create(true).truncate(true) }
                .mode(0o600)
                .open(&new)?;
            lock(&file)?;
            let place_bytes = state.to_bytes(0).len().next_multiple_of(PAGE_BYTES);
            let mut made = StateFile { file, place_bytes, sequence: 0 };
            // Both places have their room in the file from now on.
            made.file.write_all_at(&vec![0; 2 * place_bytes], 0)?;
            made.keep(state)?;
            fs::rename(&new, path)?;
            Ok(made)
        };
        made().map_err(|error| failed(path, error))
    }

    /// Opens the file of an earlier device process, and returns the device's state. Returns `None`
    /// if there is no file.
    ///
    /// # Errors
    /// Those of open(2) and read(2), or the file is in use, or has no state.
    pub fn open(path: &Path) -> Result<Option<(StateFile, Saved)>, StateFileError> {
        let file = match File::options().read(true).write(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(|error| failed(path, error))?,
        };
        let bytes = read(&file).map_err(|error| failed(path, error))?;
        let place_bytes = bytes.len() / 2;
        let unusable = |error| StateFileError::Unusable { path: path.into(), error };
        if place_bytes == 0 || !bytes.len().is_multiple_of(2 * PAGE_BYTES) {
            return Err(unusable(SavedError::Foreign));
        }
        let (first, second) = bytes.split_at(place_bytes);
        let (state, sequence) = match (Saved::from_bytes(first), Saved::from_bytes(second)) {
            (Ok(first), Ok(second)) if first.1 > second.1 => first,
            (Ok(_), Ok(second)) => second,
            (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
            (Err(error), Err(_)) => return Err(unusable(error)),
        };
        Ok(Some((StateFile { file, place_bytes, sequence }, state)))
    }
}

impl Record for StateFile {
    fn keep(&mut self, state: &Saved) -> io::Result<()> {
        let sequence = self.sequence + 1;
        let bytes = state.to_bytes(sequence);
        if bytes.len() > self.place_bytes {
            return Err(io::Error::other("state of another device"));
        }
        // This is not the place of the last state, because a half-written state is worth nothing.
        let place = (sequence % 2) * self.place_bytes as u64;
        self.file.write_all_at(&bytes, place)?;
        self.sequence = sequence;
        Ok(())
    }
}

fn read(file: &File) -> io::Result<Vec<u8>> {
    lock(file)?;
    let most = 2 * BYTES_MAX.next_multiple_of(PAGE_BYTES);
    let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX).min(most);
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn lock(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

fn failed(path: &Path, error: io::Error) -> StateFileError {
    match error.kind() {
        io::ErrorKind::WouldBlock => StateFileError::InUse(path.into()),
        _ => StateFileError::Io { path: path.into(), error },
    }
}

#[cfg(test)]
mod tests {
    use ebb_units::Gpa;

    use super::*;

    const GEOMETRY: Geometry =
        Geometry { start: Gpa(4 << 30), region_bytes: 1 << 30, block_bytes: 2 << 20, node: None };

    fn state(requested_blocks: u64) -> Saved {
        let bytes = requested_blocks << 21;
        Saved { usable_bytes: bytes, requested_bytes: bytes, ..Saved::new(GEOMETRY).unwrap() }
    }

    fn open(path: &Path) -> Saved {
        StateFile::open(path).unwrap().unwrap().1
    }

    #[test]
    fn the_last_state_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        assert!(StateFile::open(&path).unwrap().is_none());
        let (mut file, found) = StateFile::open_or_create(&path, GEOMETRY).unwrap();
        assert_eq!(found, state(0));
        for blocks in 1..5 {
            file.keep(&state(blocks)).unwrap();
            drop(file);
            let (again, found) = StateFile::open_or_create(&path, GEOMETRY).unwrap();
            assert_eq!(found, state(blocks));
            file = again;
        }
        let other = Geometry { node: Some(0), ..GEOMETRY };
        drop(file);
        let error = StateFile::open_or_create(&path, other).unwrap_err();
        assert!(matches!(error, StateFileError::Region { found: GEOMETRY, .. }), "{error}");
    }

    #[test]
    fn only_one_process_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let (_file, _) = StateFile::open_or_create(&path, GEOMETRY).unwrap();
        for error in
            [StateFile::open(&path).unwrap_err(), StateFile::create(&path, &state(0)).unwrap_err()]
        {
            assert!(matches!(error, StateFileError::InUse(_)), "{error}");
        }
    }

    /// A process that dies during a write leaves any part of what it wrote.
    #[test]
    fn a_torn_write_leaves_the_state_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let (mut file, _) = StateFile::open_or_create(&path, GEOMETRY).unwrap();
        (1..5).for_each(|blocks| file.keep(&state(blocks)).unwrap());
        let before = fs::read(&path).unwrap();
        file.keep(&state(5)).unwrap();
        drop(file);
        let after = fs::read(&path).unwrap();
        let changed = (0..after.len()).filter(|&at| before[at] != after[at]);
        let ends: Vec<usize> = changed.collect();
        for &end in &ends {
            let torn = [&after[..end], &before[end..]].concat();
            fs::write(&path, torn).unwrap();
            assert_eq!(open(&path), state(4), "torn at byte {end}");
        }
        fs::write(&path, after).unwrap();
        assert_eq!(open(&path), state(5));
    }

    #[test]
    fn an_unusable_state_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        for content in [vec![], vec![0; 8192], vec![0xff; 8192], vec![0; 100], vec![0; 12288]] {
            fs::write(&path, content).unwrap();
            let error = StateFile::open_or_create(&path, GEOMETRY).unwrap_err();
            assert!(matches!(error, StateFileError::Unusable { .. }), "{error}");
        }
    }
}
