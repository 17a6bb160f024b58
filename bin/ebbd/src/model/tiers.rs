//! A VM's tiers, as they are on record.

use std::path::PathBuf;

use ebb_tier::{Ladder, TierKind};
use serde::{Deserialize, Serialize};

/// The tiers of a VM, as they are on record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tiers {
    /// The ladder as it was asked for.
    pub ladder: String,
    /// Capacity of the fastest tier, in bytes.
    pub fast_bytes: u64,
    /// Most memory of the host in bytes, where a file has the rest.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Most memory of compressed pages, as a part of that; 0: there are none.
    pub compressed_bytes: u64,
    /// The file of the rest.
    pub file: Option<PathBuf>,
    /// Number of pages for which there is room in that file, or in the VM's swap file.
    pub slots: u64,
}

impl Tiers {
    /// Whether some tiers are NUMA nodes; true also if the ladder cannot be parsed.
    pub fn has_nodes(&self) -> bool {
        self.ladder.parse().map_or(true, |ladder| has_nodes(&ladder))
    }
}

/// Whether some of these tiers are NUMA nodes.
pub fn has_nodes(ladder: &Ladder) -> bool {
    ladder.rungs().iter().any(|rung| matches!(rung.kind, TierKind::Node(_)))
}
