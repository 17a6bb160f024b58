//! A VM's share of the pool.

use ebb_api::UPPER_PERCENT_MAX;
use ebb_tier::Limits;
use ebb_units::FRAME_BYTES;
use serde::{Deserialize, Serialize};

use super::BYTES_MAX;

/// A VM's share, on record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Share {
    /// The share.
    pub bytes: u64,
    /// Of it, what the VM never has less than.
    pub lower_percent: u32,
    /// And never more.
    pub upper_percent: u32,
}

impl Share {
    /// As the pool counts it.
    pub fn limits(self) -> Limits {
        let Share { bytes, lower_percent, upper_percent } = self;
        Limits { share_frames: bytes / FRAME_BYTES, lower_percent, upper_percent }
    }

    /// Whether it is one that could be asked for.
    pub fn adds_up(self) -> bool {
        let Share { bytes, lower_percent, upper_percent } = self;
        bytes <= BYTES_MAX
            && lower_percent <= 100
            && (100..=UPPER_PERCENT_MAX).contains(&upper_percent)
    }

    /// The least that the VM has.
    pub fn lower_bytes(self) -> u64 {
        self.limits().lower_frames() * FRAME_BYTES
    }
}
