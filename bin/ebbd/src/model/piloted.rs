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
    /// Evicted memory that came back within seconds, or while the VM was at its limit, in all;
    /// none: the process is of an older daemon.
    #[serde(default)]
    pub missed_total_bytes: Option<u64>,
    /// Its compressed memory; none: it can have none.
    #[serde(default)]
    pub compressed: Option<PilotedCompressed>,
    /// Memory that its guest has plugged; none: it can unplug none, and the pilot has had it unplug
    /// none.
    #[serde(default)]
    pub plugged: Option<PilotedPlugged>,
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

/// What the pilot needs to know of a VM's plugged memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PilotedPlugged {
    /// What is plugged.
    pub bytes: u64,
    /// What is to be plugged.
    pub asked_bytes: u64,
    /// What was to be plugged before the pilot had the guest unplug any.
    pub full_bytes: u64,
    /// What is plugged or unplugged at a time.
    pub block_bytes: u64,
    /// Whether the guest may be asked to unplug some.
    pub may_unplug: bool,
}

impl PilotedPlugged {
    /// What the pilot has had the guest unplug.
    pub fn unplugged_bytes(self) -> u64 {
        self.full_bytes.saturating_sub(self.asked_bytes)
    }

    fn all(self) -> [u64; 4] {
        [self.bytes, self.asked_bytes, self.full_bytes, self.block_bytes]
    }
}

/// The pilot's request that a guest plug or unplug memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PlugRequest {
    /// What was to be plugged as the pilot decided. Else nothing is done.
    pub from_bytes: u64,
    /// What is to be plugged.
    pub to_bytes: u64,
}

impl Piloted {
    /// Evicted memory that the VM missed, in all. `refaulted_bytes`: what came back within seconds,
    /// which counts for a process of an older daemon.
    pub fn missed_bytes(&self, refaulted_bytes: u64) -> u64 {
        self.missed_total_bytes.unwrap_or(refaulted_bytes)
    }

    /// Whether these figures can be true.
    pub fn adds_up(&self) -> bool {
        let Piloted { taken_bytes, memory_bytes, floor_bytes, working_bytes, limit_bytes, .. } =
            *self;
        let sizes = [taken_bytes, memory_bytes, floor_bytes];
        let compressed = self.compressed.map(|it| it.most_bytes.max(it.own_bytes));
        let plugged = self.plugged.map(PilotedPlugged::all).into_iter().flatten();
        let others = working_bytes.into_iter().chain(limit_bytes).chain(compressed).chain(plugged);
        sizes.into_iter().chain(others).all(|bytes| bytes <= BYTES_MAX)
    }
}
