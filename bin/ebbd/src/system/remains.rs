//! What a VM has beside its record, and how that is removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{cgroup, starting};
use crate::model::record::Record;
use crate::support::life::Dead;
use crate::support::state_file;

/// Path of the ledger.
pub fn ledger_path(directory: &Path) -> PathBuf {
    directory.join("ledger")
}

/// Path of the digests of disk-backed frames.
pub fn digests_path(directory: &Path) -> PathBuf {
    directory.join("digests")
}

/// Removes what a VM has in its directory, its record first. Files that do not exist are no error.
/// The mark of a start stays: its QEMU may run, and nothing else tells of it.
///
/// # Errors
/// Those of unlink(2).
pub fn forget(directory: &Path) -> io::Result<()> {
    Record::remove(directory)?;
    ebb_store::remove(directory)?;
    let paths = [ledger_path(directory), digests_path(directory)];
    paths.iter().try_for_each(|path| state_file::remove_if_there(path))
}

/// Removes all that an ended VM left.
///
/// # Errors
/// Those of unlink(2).
pub fn clear(record: Option<&Record>, directory: &Path, _: &Dead) -> io::Result<()> {
    if let Some(record) = record {
        remove_swap(record);
        cgroup::remove_of(record);
    }
    starting::unmark(directory)?;
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes a VM's swap file, which nobody can read once its key is removed. A block device stays.
pub fn remove_swap(record: &Record) {
    if record.swap.metadata().is_ok_and(|found| !found.is_file()) {
        return;
    }
    if let Err(error) = state_file::remove_if_there(&record.swap) {
        tracing::error!("{}: {error}", record.swap.display());
    }
}
