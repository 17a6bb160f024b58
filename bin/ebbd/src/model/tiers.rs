//! A VM's tiers, as they are on record.

use std::path::PathBuf;

use ebb_tier::{Kind, Ladder};
use serde::{Deserialize, Serialize};

/// The tiers of a VM, on record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tiers {
    /// As they were asked for.
    pub ladder: String,
    /// What the first holds.
    pub fast_bytes: u64,
    /// What is held in the host's memory at most, where there is a file for the rest.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// What compressed pages may take of it; 0: there are none.
    pub compressed_bytes: u64,
    /// Where the rest is.
    pub file: Option<PathBuf>,
    /// Pages that have room there, or in the VM's swap file.
    pub slots: u64,
}

impl Tiers {
    /// Whether some are NUMA nodes, as far as their names can be read.
    pub fn has_nodes(&self) -> bool {
        self.ladder.parse().map_or(true, |ladder| has_nodes(&ladder))
    }
}

/// Whether some of these tiers are NUMA nodes.
pub fn has_nodes(ladder: &Ladder) -> bool {
    ladder.rungs().iter().any(|rung| matches!(rung.kind, Kind::Node(_)))
}
