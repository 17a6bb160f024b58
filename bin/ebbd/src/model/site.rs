//! What holds for all VMs of one run directory, as `ebbd` tells each VM's process.

use std::path::{Path, PathBuf};

use ebb_api::VmName;
use serde::{Deserialize, Serialize};

use super::record::Settings;

/// Where things are, and what `ebbd` was told when it started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Site {
    /// Sockets and records.
    pub run_dir: PathBuf,
    /// Logs.
    pub log_dir: PathBuf,
    /// Swap files.
    pub swap_dir: PathBuf,
    /// For each VM.
    pub settings: Settings,
    /// Who QEMUs are unless a request says otherwise, as `--vm-user` has it.
    pub vm_user: String,
}

impl Site {
    /// A VM's directory.
    pub fn directory(&self, name: &VmName) -> PathBuf {
        self.vms().join(name.as_str())
    }

    /// The directory of all VMs' directories.
    pub fn vms(&self) -> PathBuf {
        self.run_dir.join("vms")
    }

    /// Where a VM's logs go; none: in its directory.
    pub fn logs(&self, name: &VmName) -> Option<PathBuf> {
        (self.log_dir != self.run_dir).then(|| self.log_dir.join(name.as_str()))
    }

    /// Where a VM's swap file goes. The process's number tells it from that of a VM of the same name
    /// under another run directory.
    pub fn swap_path(&self, name: &VmName, pid: i32) -> PathBuf {
        self.swap_dir.join(format!("{name}.{pid}.swap"))
    }
}

/// The socket on which a VM's process serves its part of the REST interface.
pub fn api_socket(directory: &Path) -> PathBuf {
    directory.join("api.sock")
}
