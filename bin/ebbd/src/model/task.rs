//! What `ebbd` tells a VM's process, and what that answers: JSON on its standard input and output.

use ebb_api::{AttachRequest, RunRequest, VmName};
use serde::{Deserialize, Serialize};

use super::api_error::ApiError;
use super::site::Site;

/// The subcommand of a VM's process, on `ebbd`'s command line.
pub const COMMAND: &str = "vm";

/// What a VM's process is to do.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    /// Directories and settings.
    pub site: Site,
    /// Name of the VM.
    pub name: VmName,
    /// Slot of its swap file in the table that all swap files share; none: it shares none.
    pub slot: Option<usize>,
    /// Process number of `ebbd`. If `ebbd` dies before the VM's lock is taken, the next one knows
    /// nothing of this process.
    pub parent: u32,
    /// How to begin.
    pub work: Work,
}

/// How a VM comes to be managed.
#[derive(Debug, Serialize, Deserialize)]
pub enum Work {
    /// Start its QEMU.
    Run(Box<RunRequest>),
    /// Attach a QEMU that somebody else started.
    Attach(AttachRequest),
    /// Recover a VM that another process managed before.
    Recover,
}

/// Result of the task.
#[derive(Debug, Serialize, Deserialize)]
pub enum TaskResult {
    /// The VM is managed, and its process serves its socket.
    Managed,
    /// There is nothing left to recover.
    Over,
    /// The VM is not managed. Nothing is left behind, or a record for the next process.
    Refused(ApiError),
}
