//! What swap files may take, and what a VM at its limit does when its swap file is full.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What becomes of a VM at its limit when nothing more can be saved.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenFull {
    /// The guest waits if it needs more memory, until there is room
    #[default]
    Wait,
    /// The limit gives way: the VM takes more of the host's memory
    GiveWay,
}

/// Quotas of swap files, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct SwapQuota {
    /// Most that all swap files together take; none: no bound.
    pub all_bytes: Option<u64>,
    /// Most that each swap file takes; none: no bound.
    pub each_bytes: Option<u64>,
    /// Free space to leave on their file system; none: a fiftieth, 1 GiB at most.
    pub floor_bytes: Option<u64>,
}
