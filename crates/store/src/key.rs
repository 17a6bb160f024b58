//! The key of one VM's swap file: 32 random bytes in the VM's run directory.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::rand::{GetRandomFlags, getrandom};
use zeroize::Zeroizing;

use crate::StoreError;

/// The key's file.
pub(crate) const FILE: &str = "swap.key";

/// The key's file while it is written.
pub(crate) const NEXT: &str = "swap.key.next";

/// A key for AES-256. Dropping it overwrites it.
pub(crate) type Key = Zeroizing<[u8; 32]>;

/// Returns the key in `run`. `None`: there is none.
pub(crate) fn load(run: &Path) -> Result<Option<Key>, StoreError> {
    let mut key = Key::default();
    let read = File::open(run.join(FILE)).and_then(|mut file| file.read_exact(&mut *key));
    match read {
        Ok(()) => Ok(Some(key)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Makes a new key. Its file is there as a whole or not at all.
pub(crate) fn create(run: &Path) -> Result<Key, StoreError> {
    let mut key = Key::default();
    if getrandom(&mut *key, GetRandomFlags::empty())? != key.len() {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    let next = run.join(NEXT);
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options.open(&next).and_then(|mut file| file.write_all(&*key));
    if let Err(error) = written.and_then(|()| fs::rename(&next, run.join(FILE))) {
        // The first error matters more than a second one.
        let _ = fs::remove_file(&next);
        return Err(error.into());
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_cannot_be_put_in_place_leaves_nothing() {
        let run = tempfile::tempdir().unwrap();
        // A file cannot take the place of a directory.
        fs::create_dir(run.path().join(FILE)).unwrap();
        assert!(create(run.path()).is_err());
        assert!(!run.path().join(NEXT).exists());
        // Removing a store removes what a dead daemon left too.
        fs::write(run.path().join(NEXT), "half").unwrap();
        fs::remove_dir(run.path().join(FILE)).unwrap();
        crate::remove(run.path()).unwrap();
        assert!(!run.path().join(NEXT).exists());
    }
}
