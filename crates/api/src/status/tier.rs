//! A VM's tiers, and what each holds.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The tiers of a VM, and whether the fast one is large enough.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct TierStatus {
    /// The VM's tiers, fastest first, as in `--tier`.
    pub ladder: String,
    /// Size of the first tier.
    pub fast_bytes: u64,
    /// What the VM works with: frames that were used in the current turn of their window, or in the
    /// turn before, even if they are evicted now. A turn takes 2.5 to 32 s while much has to be
    /// evicted, and longer otherwise. Null: the clock hand has not visited all memory yet, because
    /// too little had to be evicted. More than half of `fast_bytes` is too much.
    pub active_bytes: Option<u64>,
    /// The hot set by the last monitoring, on whatever tier; null: there was no monitoring lately.
    /// More than half of `fast_bytes` is too much.
    #[serde(default)]
    pub hot_bytes: Option<u64>,
    /// What each tier holds now, fastest first; a NUMA node: at the last placement.
    #[serde(default)]
    pub tiers: Vec<TierUse>,
    /// Moved between NUMA nodes by the VM's current process; null: no tier is a NUMA node.
    #[serde(default)]
    pub moved_bytes: Option<u64>,
    /// Sentences for the operator about its tiers. They are in the VM's `warnings`, too.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// What a tier holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TierUse {
    /// The tier, as in the ladder.
    pub tier: String,
    /// How much of the guest's memory it may hold; for compressed memory, what the pages may take.
    pub bytes: u64,
    /// How much of the guest's memory it holds.
    pub held_bytes: u64,
}
