//! The directory in which swap files of VMs to come are made. A VM that is held has its swap file's
//! path on record, so it is served without it.

use std::io;
use std::path::{Path, PathBuf};

use ebb_api::{advice, route};
use ebb_sys::private_dir;

use crate::model::record::Record;

/// The directory.
#[derive(Clone, Debug)]
pub struct SwapDir {
    path: PathBuf,
    is_named: bool,
}

impl SwapDir {
    /// The one that is named, else the default of this run directory.
    ///
    /// # Errors
    /// As getcwd(2); `InvalidInput`: an empty path.
    pub fn new(run_dir: &Path, named: Option<&Path>) -> io::Result<SwapDir> {
        let path = std::path::absolute(route::swap_dir(run_dir, named))?;
        Ok(SwapDir { path, is_named: named.is_some() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sees to it that the directory is there and nobody else's. One that is named may be a disk
    /// that is not mounted, or a slip: only the default is made.
    ///
    /// # Errors
    /// Why it cannot be used, and what to do, in one line.
    pub fn check(&self) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| format!("swap directory: {error}");
        if self.is_named && !self.path.try_exists().map_err(|error| text(&error))? {
            let (why, advice) = advice::no_swap_dir(&self.path);
            return Err(format!("{why}: {advice}"));
        }
        private_dir::make(&self.path).map_err(|error| text(&error))
    }

    /// The same at the daemon's start. Guests of VMs on record wait for what was evicted, so these
    /// are served in any case.
    ///
    /// # Errors
    /// The directory cannot be used, and there is no VM on record.
    pub fn begin(&self, run_dir: &Path) -> Result<(), String> {
        match self.check() {
            Err(why) if Record::is_any_in(run_dir) => tracing::warn!(
                "{why}; VMs that are managed already are served, and none is started or attached \
                 until then"
            ),
            checked => checked?,
        }
        if ebb_store::is_in_memory(&self.path).is_ok_and(|is| is) {
            let (why, advice) = advice::swap_in_memory(&self.path, false);
            tracing::warn!("{why}: {advice}");
        }
        Ok(())
    }
}
