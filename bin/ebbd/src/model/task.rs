//! What `ebbd` tells the process of a VM, and what that answers: JSON, on its standard input and output.

use ebb_api::{AttachRequest, RunRequest, VmName};
use serde::{Deserialize, Serialize};

use super::api_error::ApiError;
use super::site::Site;

/// What a VM's process is to do.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    /// Where.
    pub site: Site,
    /// Of which VM.
    pub name: VmName,
    /// The slot of its swap file in the table that all share; none: it shares none.
    pub slot: Option<usize>,
    /// The process of `ebbd`. If that has died before the VM's lock is taken, the next one knows nothing
    /// of this process.
    pub parent: u32,
    /// What to begin with.
    pub work: Work,
}

/// How a VM comes to be managed.
#[derive(Debug, Serialize, Deserialize)]
pub enum Work {
    /// Its QEMU is to be started.
    Run(Box<RunRequest>),
    /// Somebody else started its QEMU.
    Attach(AttachRequest),
    /// A process before this one managed it.
    Recover,
}

/// What came of it.
#[derive(Debug, Serialize, Deserialize)]
pub enum Told {
    /// The VM is managed, and its process serves its socket.
    Managed,
    /// There is nothing to recover any more.
    Over,
    /// It is not; nothing is left behind.
    Refused(ApiError),
}
