//! What a VM's process publishes of the VM, for `ebbd` and for whoever asks.

use std::time::Duration;

use ebb_api::VmStatus;
use serde::{Deserialize, Serialize};

use super::member::Member;

/// All figures of a VM at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// Counts up with each publication of one process.
    pub number: u64,
    /// Everything.
    pub status: VmStatus,
    /// What the pool wants to know; none: the VM is not in it.
    pub member: Option<Member>,
}

/// A worker publishes every second: beyond this it is slow.
const SLOW: Duration = Duration::from_secs(5);

/// Why figures of this age are not newer; none: they are not old.
pub fn slow(age: Duration) -> Option<String> {
    let since = || format!("it is busy, or QEMU does not answer, for {} s", age.as_secs());
    (age >= SLOW).then(since)
}

/// In milliseconds.
pub fn millis(age: Duration) -> u64 {
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX)
}
