//! A VM's share of the pool.

use ebb_api::UPPER_PERCENT_MAX;
use ebb_tier::Limits;
use ebb_units::FRAME_BYTES;
use serde::{Deserialize, Serialize};

use super::BYTES_MAX;

/// A VM's share of the pool, as it is on record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Share {
    /// Size of the share.
    pub bytes: u64,
    /// Least memory of the VM, in percent of the share.
    pub lower_percent: u32,
    /// Most memory of the VM, in percent of the share.
    pub upper_percent: u32,
}

impl Share {
    /// The share and its bounds in the pool's form.
    pub fn limits(self) -> Limits {
        let Share { bytes, lower_percent, upper_percent } = self;
        Limits { share_frames: bytes / FRAME_BYTES, lower_percent, upper_percent }
    }

    /// Whether a client could have asked for this share.
    pub fn adds_up(self) -> bool {
        let Share { bytes, lower_percent, upper_percent } = self;
        bytes <= BYTES_MAX
            && lower_percent <= 100
            && (100..=UPPER_PERCENT_MAX).contains(&upper_percent)
    }

    /// Least memory of the VM in bytes.
    pub fn lower_bytes(self) -> u64 {
        self.limits().lower_frames() * FRAME_BYTES
    }
}
