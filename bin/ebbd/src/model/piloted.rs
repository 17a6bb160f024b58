//! What the process of a VM tells the pilot.

use serde::{Deserialize, Serialize};

use super::BYTES_MAX;

/// What the pilot needs to know of a VM beside its status.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Piloted {
    /// Host memory that the VM takes.
    pub taken_bytes: u64,
    /// All of its memory.
    pub memory_bytes: u64,
    /// The lowest limit that its guest survives.
    pub floor_bytes: u64,
    /// What it works with; none: not known.
    pub working_bytes: Option<u64>,
    /// The limit that the pilot has given it; none: none.
    pub limit_bytes: Option<u64>,
    /// Its compressed memory; none: it can have none.
    #[serde(default)]
    pub compressed: Option<PilotedCompressed>,
    /// Why the pilot cannot limit it; none: it can.
    pub left_alone: Option<String>,
}

/// What the pilot needs to know of a VM's compressed memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PilotedCompressed {
    /// The most that compressed pages may take, beside what the limit says.
    pub most_bytes: u64,
    /// Whether the pilot has set it.
    pub is_piloted: bool,
    /// What it would be without the pilot.
    #[serde(default)]
    pub own_bytes: u64,
}

impl Piloted {
    /// Whether these figures can be true.
    pub fn adds_up(&self) -> bool {
        let Piloted { taken_bytes, memory_bytes, floor_bytes, working_bytes, limit_bytes, .. } =
            *self;
        let sizes = [taken_bytes, memory_bytes, floor_bytes];
        let compressed = self.compressed.map(|it| it.most_bytes.max(it.own_bytes));
        let others = working_bytes.into_iter().chain(limit_bytes).chain(compressed);
        sizes.into_iter().chain(others).all(|bytes| bytes <= BYTES_MAX)
    }
}
