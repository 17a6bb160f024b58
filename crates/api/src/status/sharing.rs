//! The allocator that a guest shares with the host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::faults::FaultTimes;
use crate::OnViolation;

/// What HyperAlloc does, for a guest that shares its page-frame allocator; for other guests all is
/// null or 0.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SharingStatus {
    /// The target for the initial memory, by HyperAlloc; null: all of it.
    pub size_bytes: Option<u64>,
    /// Hard-reclaimed memory: the guest has it again once the host returns it.
    pub hard_bytes: u64,
    /// Soft-reclaimed memory: the guest has it again once it uses it.
    pub soft_bytes: u64,
    /// Huge frames that came back by a touch, since the VM's current process shares the allocator.
    pub installs: u64,
    /// Time from the lock of such a huge frame until all of it has memory.
    pub install_ns: FaultTimes,
    /// Touches of hard-reclaimed memory.
    pub violations: u64,
    /// What happens at such a touch.
    pub on_violation: OnViolation,
    /// Why Ebb stopped the VM; null: it did not.
    pub stopped: Option<String>,
    /// How scattered the guest's memory is over huge frames; null: this cannot be seen.
    pub fragmentation: Option<Fragmentation>,
}

/// Memory in use by the guest's allocator, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct Fragmentation {
    /// Memory of the kernel, which cannot be moved.
    pub unmovable: KindBytes,
    /// Memory of processes, and page cache.
    pub movable: KindBytes,
    /// Blocks of 2 MiB and more.
    pub huge: KindBytes,
}

/// Memory in use of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct KindBytes {
    /// Huge frames of which any part is in use.
    pub huge_bytes: u64,
    /// Memory in use in them.
    pub used_bytes: u64,
}
