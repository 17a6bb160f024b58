//! What a VM in the pool tells the pool.

use ebb_tier::Need;
use ebb_units::FRAME_BYTES;
use serde::{Deserialize, Serialize};

use super::record::Record;
use super::share::Share;

/// What the worker of a VM in the pool tells the pool.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Member {
    /// The share on record.
    pub share: Share,
    /// Memory that the VM takes.
    pub held_bytes: u64,
    /// The limit; none: all of its memory.
    pub limit_bytes: Option<u64>,
    /// Its hot set, if it was monitored lately. It is larger than with slow memory, since a page
    /// below comes back only by a fault.
    pub hot_bytes: Option<u64>,
    /// Memory that it needs as well, but whose use cannot be seen: resident memory of the guest's
    /// kernel. What was evicted of that is not missed.
    pub unseen_bytes: u64,
    /// What it asks for because evicted memory comes back to it; none: it is not short of memory.
    #[serde(default)]
    pub demand_bytes: Option<u64>,
    /// All of its memory.
    pub memory_bytes: u64,
}

impl Member {
    /// A VM that is not recovered yet: it counts with the limit that it had last.
    pub fn on_record(record: &Record) -> Option<Member> {
        let (share, memory_bytes) = (record.share?, record.memory_bytes());
        let limit_bytes = record.limit_bytes.map(|bytes| bytes.min(memory_bytes));
        let held_bytes = limit_bytes.unwrap_or(memory_bytes);
        Some(Member {
            share,
            held_bytes,
            limit_bytes,
            hot_bytes: None,
            unseen_bytes: 0,
            demand_bytes: None,
            memory_bytes,
        })
    }

    /// Memory that the VM wants: its share, if its hot set is not known. The hot set is known only
    /// after a monitoring, so a VM that is short of memory wants at least what it asks for, and
    /// its share.
    fn wanted_bytes(&self) -> u64 {
        let known = self.hot_bytes.map_or(self.share.bytes, |bytes| bytes + self.unseen_bytes);
        known.max(self.demand_bytes.map_or(0, |bytes| bytes.max(self.share.bytes)))
    }

    /// What the VM needs of the pool. Memory that it was given counts, whether or not it uses it.
    pub fn need(&self) -> Need {
        let given = self.limit_bytes.unwrap_or(self.memory_bytes);
        Need {
            held_frames: self.held_bytes.max(given).div_ceil(FRAME_BYTES),
            hot_frames: self.wanted_bytes().div_ceil(FRAME_BYTES),
        }
    }
}
