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
    /// Its size; none: it plugs nothing, or its size is not the pilot's to change.
    #[serde(default)]
    pub size: Option<PilotedSize>,
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
}

/// What the pilot needs to know of the size of a VM that plugs memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PilotedSize {
    /// What its guest has.
    pub bytes: u64,
    /// What its guest is to have.
    pub target_bytes: u64,
    /// What it was to have before the pilot took any.
    pub full_bytes: u64,
    /// What it has with nothing plugged.
    pub base_bytes: u64,
    /// Sizes are whole numbers of these above that.
    pub block_bytes: u64,
}

impl PilotedSize {
    fn all(self) -> [u64; 5] {
        [self.bytes, self.target_bytes, self.full_bytes, self.base_bytes, self.block_bytes]
    }
}

impl Piloted {
    /// Whether these figures can be true.
    pub fn adds_up(&self) -> bool {
        let Piloted { taken_bytes, memory_bytes, floor_bytes, working_bytes, limit_bytes, .. } =
            *self;
        let sizes = [taken_bytes, memory_bytes, floor_bytes];
        let compressed = self.compressed.map(|compressed| compressed.most_bytes);
        let size = self.size.map(PilotedSize::all).into_iter().flatten();
        let others = working_bytes.into_iter().chain(limit_bytes).chain(compressed).chain(size);
        sizes.into_iter().chain(others).all(|bytes| bytes <= BYTES_MAX)
    }
}
