//! Where a VM's memory is.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a VM's memory is, in parts that add up to `memory_bytes`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct MemoryParts {
    /// Resident, and not free as far as is known.
    pub in_use_bytes: u64,
    /// Resident and free in the guest: what the guest counts as free, without what is empty. Empty
    /// frames that are in use make it a little too small. Null counts as 0: it is not known, because
    /// the guest is not trusted.
    pub free_bytes: Option<u64>,
    /// Non-resident and empty: reclaimed, in the balloon, never used, or the same byte everywhere.
    pub empty_bytes: u64,
    /// Evicted, with the content in compressed memory. What that takes is
    /// `limit.compressed_bytes`.
    pub compressed_bytes: u64,
    /// Evicted, with the content in the swap file.
    pub swapped_bytes: u64,
    /// Evicted, and a block of the guest's disk has the content.
    pub disk_backed_bytes: u64,
}

impl MemoryParts {
    /// The part that takes host memory.
    pub fn resident_bytes(&self) -> u64 {
        self.in_use_bytes.saturating_add(self.free_bytes.unwrap_or(0))
    }

    /// The part whose content is kept elsewhere.
    pub fn evicted_bytes(&self) -> u64 {
        let parts = [self.compressed_bytes, self.swapped_bytes, self.disk_backed_bytes];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// All parts together.
    pub fn sum_bytes(&self) -> u64 {
        let parts = [self.resident_bytes(), self.empty_bytes, self.evicted_bytes()];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}
