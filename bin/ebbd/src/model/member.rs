//! What a VM in the pool says of itself.

use ebb_tier::Need;
use ebb_units::FRAME_BYTES;
use serde::{Deserialize, Serialize};

use super::record::Record;
use super::share::Share;

/// What a worker says of a VM in the pool.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Member {
    /// On record.
    pub share: Share,
    /// It takes so much.
    pub held_bytes: u64,
    /// It may have so much; none: all of its memory.
    pub limit_bytes: Option<u64>,
    /// What it uses again and again, if it was monitored lately: a page below comes back by a
    /// fault, so more is hot than where slow memory is only slower.
    pub hot_bytes: Option<u64>,
    /// What it needs besides, since nobody could see it used: its kernel's own memory, as far as that
    /// is there. What was evicted of it is not missed.
    pub unseen_bytes: u64,
    /// All of its memory.
    pub memory_bytes: u64,
}

impl Member {
    /// Of a VM that is not taken up yet: it has what it was given last.
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
            memory_bytes,
        })
    }

    /// Of a hot set that is not known: the share.
    fn wanted_bytes(&self) -> u64 {
        self.hot_bytes.map_or(self.share.bytes, |bytes| bytes + self.unseen_bytes)
    }

    /// What it was given counts as held, whether it took it or not.
    pub fn need(&self) -> Need {
        let given = self.limit_bytes.unwrap_or(self.memory_bytes);
        Need {
            held_frames: self.held_bytes.max(given).div_ceil(FRAME_BYTES),
            hot_frames: self.wanted_bytes().div_ceil(FRAME_BYTES),
        }
    }
}
