//! What swap files may take, and what becomes of a VM whose swap file can take no more.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What becomes of a VM at its limit when nothing more can be saved.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenFull {
    /// Its guest waits where it needs more memory, until there is room
    #[default]
    Wait,
    /// Its limit gives way: it takes more memory of the host
    GiveWay,
}

/// What swap files may take, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct SwapQuota {
    /// All of them together; none: what there is.
    pub all_bytes: Option<u64>,
    /// Each of them; none: what there is.
    pub each_bytes: Option<u64>,
    /// What stays free of their file system; none: a fiftieth, 1 GiB at most.
    pub floor_bytes: Option<u64>,
}
