//! What holds for all VMs of one run directory, as `ebbd` tells it to each VM's process.

use std::path::{Path, PathBuf};

use ebb_api::VmName;
use serde::{Deserialize, Serialize};

use super::record::Settings;

/// Directories, and the options that `ebbd` got at its start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Site {
    /// Directory of sockets and records.
    pub run_dir: PathBuf,
    /// Directory of logs.
    pub log_dir: PathBuf,
    /// Directory of swap files.
    pub swap_dir: PathBuf,
    /// Settings of each VM.
    pub settings: Settings,
    /// User that QEMUs run as unless a request names one, as in `--vm-user`.
    pub vm_user: String,
}

impl Site {
    /// The VM's directory.
    pub fn directory(&self, name: &VmName) -> PathBuf {
        self.vms().join(name.as_str())
    }

    /// Directory with the directories of all VMs.
    pub fn vms(&self) -> PathBuf {
        self.run_dir.join("vms")
    }

    /// Directory of a VM's logs; none: they are in the VM's directory.
    pub fn logs(&self, name: &VmName) -> Option<PathBuf> {
        (self.log_dir != self.run_dir).then(|| self.log_dir.join(name.as_str()))
    }

    /// Path of a VM's swap file. The VMM's process number tells it from the swap file of a VM with
    /// the same name under another run directory.
    pub fn swap_path(&self, name: &VmName, pid: i32) -> PathBuf {
        self.swap_dir.join(format!("{name}.{pid}.swap"))
    }
}

/// Socket on which a VM's process serves its part of the REST interface.
pub fn api_socket(directory: &Path) -> PathBuf {
    directory.join("api.sock")
}
