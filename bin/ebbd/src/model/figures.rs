//! What a VM's process publishes of the VM, for `ebbd` and for clients.

use std::time::Duration;

use ebb_api::VmStatus;
use serde::{Deserialize, Serialize};

use super::member::Member;
use super::piloted::Piloted;
use super::times::Times;

/// All figures of a VM at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VmFigures {
    /// Number of the publication: counts up within one process.
    pub number: u64,
    /// The whole status.
    pub status: VmStatus,
    /// What the pool needs to know; none: the VM is not in the pool.
    pub member: Option<Member>,
    /// What the pilot needs to know; none: the process is of an older daemon.
    #[serde(default)]
    pub piloted: Option<Piloted>,
    /// How long things took; none: the process is of an older daemon.
    #[serde(default)]
    pub times: Option<Times>,
}

/// A worker publishes at once if so much evicted memory came back within seconds, since the pilot
/// may have taken too much. From a slow disk, so much comes back within a tenth of a second.
pub const MISSED_BYTES: u64 = 256 << 10;
/// A worker publishes every second. Figures older than this mean that it is slow.
const SLOW: Duration = Duration::from_secs(5);

/// Why the figures are this old; none: they are recent.
pub fn slow(age: Duration) -> Option<String> {
    let since = || {
        let seconds = age.as_secs();
        format!("for {seconds} s its process has been busy or stopped, or QEMU has not answered")
    };
    (age >= SLOW).then(since)
}

/// The age in milliseconds.
pub fn millis(age: Duration) -> u64 {
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX)
}
