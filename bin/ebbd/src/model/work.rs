//! Work of a VM's process that `ebbd` follows for a job.

use serde::{Deserialize, Serialize};

/// Why a work ended that was cancelled. `ebbd` knows by it that it was.
pub const CANCELLED: &str = "it was cancelled";

/// Has the VM's process know a request by the number of a job.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub struct WorkQuery {
    /// The number; none: nobody follows the request.
    #[serde(default)]
    pub work: Option<u64>,
}

/// How far a work is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WorkProgress {
    /// What is done.
    pub done_bytes: u64,
    /// What there is to do; none: nobody knows.
    pub total_bytes: Option<u64>,
}
