//! A VM's tiers, and what each holds.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The tiers that hold a VM's memory, and whether the fast one is large enough.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct TierStatus {
    /// All of them, fastest first.
    pub ladder: String,
    /// What the first holds.
    pub fast_bytes: u64,
    /// What the VM works with: used since its part of memory was last looked at, or in the turn
    /// before, also where it has left the first since. Each part is looked at as the limit's hand
    /// comes around, every 2.5 to 32 s while much has to go, and less often else; null: not all of
    /// memory was looked at yet, as too little had to leave it. More than half of `fast_bytes` is too
    /// much.
    pub active_bytes: Option<u64>,
    /// Its hot set, as the last monitoring found it, wherever it is; null: there was none lately.
    /// More than half of `fast_bytes` is too much, too.
    #[serde(default)]
    pub hot_bytes: Option<u64>,
    /// What each tier holds, fastest first: now, but nodes when pages were placed last.
    #[serde(default)]
    pub tiers: Vec<TierUse>,
    /// Moved between NUMA nodes by this daemon; null: its tiers are none.
    #[serde(default)]
    pub moved_bytes: Option<u64>,
}

/// What a tier holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct TierUse {
    /// The tier, as its ladder names it.
    pub tier: String,
    /// What it may hold; of compressed memory what it may take.
    pub bytes: u64,
    /// Of the guest's memory it holds so much.
    pub held_bytes: u64,
}
