//! The cache directory.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

/// The cache, locked against other makers as long as this value lives.
pub struct Cache {
    root: PathBuf,
    _lock: File,
}

impl Cache {
    /// Opens `EBB_CACHE`, or `ebb` in the user's own cache directory.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn open() -> anyhow::Result<Cache> {
        let root = root()?;
        fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
        let lock = File::create(root.join("lock")).context("the cache's lock")?;
        flock(&lock, FlockOperation::LockExclusive).context("the cache's lock")?;
        Ok(Cache { root, _lock: lock })
    }

    /// Returns a directory of the cache, and makes it if it is missing.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn directory(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.root.join(name);
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// Makes a directory on the cache's file system that is removed when dropped.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn temporary(&self) -> anyhow::Result<TempDir> {
        Ok(tempfile::Builder::new().prefix("making-").tempdir_in(&self.root)?)
    }
}

fn root() -> anyhow::Result<PathBuf> {
    let from = |name, below: &str| {
        let value = env::var_os(name).filter(|value| !value.is_empty())?;
        Some(Path::new(&value).join(below))
    };
    let user = || from("XDG_CACHE_HOME", "ebb").or_else(|| from("HOME", ".cache/ebb"));
    match from("EBB_CACHE", "").or_else(user) {
        Some(root) => Ok(std::path::absolute(root)?),
        None => bail!("neither EBB_CACHE nor HOME is set: say where to keep kernels"),
    }
}

/// Returns the newest entry of `directory`.
pub fn newest(directory: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(directory).ok()?.flatten();
    let dated = entries.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry)));
    dated.max_by_key(|(modified, _)| *modified).map(|(_, entry)| entry.path())
}

/// Returns the last part of a path.
pub fn base_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
