//! The allocator that a guest shares with the host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::faults::FaultTimes;
use crate::OnViolation;

/// What is done by the allocator that a guest shares; of others all is null or 0.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SharingStatus {
    /// What the guest is to have, by its allocator, of its memory; null: all of it.
    pub size_bytes: Option<u64>,
    /// Taken from it until it is returned.
    pub hard_bytes: u64,
    /// Taken from it until it touches it.
    pub soft_bytes: u64,
    /// How often it did: huge frames that came back so, since the daemon shares its allocator.
    pub installs: u64,
    /// Time from when such a huge frame was held to when it had memory.
    pub install_ns: FaultTimes,
    /// Touches of what the guest is not to have.
    pub violations: u64,
    /// What happens then.
    pub on_violation: OnViolation,
    /// Why the VM was stopped; null: it was not.
    pub stopped: Option<String>,
    /// How the guest keeps its frames together; null where that cannot be seen.
    pub fragmentation: Option<Fragmentation>,
}

/// Memory in use by the guest's allocator, by what it was taken for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct Fragmentation {
    /// The kernel's own, which stays where it is.
    pub unmovable: KindBytes,
    /// Memory of processes, page cache.
    pub movable: KindBytes,
    /// Blocks of 2 MiB and more.
    pub huge: KindBytes,
}

/// Memory in use of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct KindBytes {
    /// In huge frames of which any part is in use.
    pub huge_bytes: u64,
    /// In use.
    pub used_bytes: u64,
}
