//! The directory for swap files of new VMs. A managed VM has the path of its swap file on record,
//! so it is served without this directory.

use std::io;
use std::path::{Path, PathBuf};

use ebb_api::{advice, route};
use ebb_sys::private_dir;

use crate::model::record::Record;

/// The directory for swap files of new VMs.
#[derive(Clone, Debug)]
pub struct SwapDir {
    path: PathBuf,
    is_named: bool,
}

impl SwapDir {
    /// The named directory, or else the default of this run directory.
    ///
    /// # Errors
    /// Those of getcwd(2). `InvalidInput`: an empty path.
    pub fn new(run_dir: &Path, named: Option<&Path>) -> io::Result<SwapDir> {
        let path = std::path::absolute(route::swap_dir(run_dir, named))?;
        Ok(SwapDir { path, is_named: named.is_some() })
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the directory exists and belongs to nobody else. Makes it only if it is the
    /// default: a named one that is missing may be a disk that is not mounted, or a typing error.
    ///
    /// # Errors
    /// Says in one line why it cannot be used, and what to do.
    pub fn check(&self) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| format!("swap directory: {error}");
        if self.is_named && !self.path.try_exists().map_err(|error| text(&error))? {
            let (why, advice) = advice::no_swap_dir(&self.path);
            return Err(format!("{why}: {advice}"));
        }
        private_dir::make(&self.path).map_err(|error| text(&error))
    }

    /// Checks the directory at the daemon's start. VMs on record are served in any case, since
    /// their guests wait for what was evicted.
    ///
    /// # Errors
    /// The directory cannot be used, and there is no VM on record.
    pub fn begin(&self, run_dir: &Path) -> Result<(), String> {
        match self.check() {
            Err(why) if Record::is_any_in(run_dir) => tracing::warn!(
                "{why}; VMs that are managed already are served, but no VM is started or attached \
                 until the directory can be used"
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
