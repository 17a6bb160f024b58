//! A VM's balloon, and what the guest tells through it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::DriverState;

/// A balloon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct BalloonStatus {
    /// What it holds.
    pub ballooned_bytes: u64,
    /// Whether the guest drives it.
    pub driver: DriverState,
    /// The guest takes memory out of it before it kills a process.
    pub deflates_on_oom: bool,
    /// How often it was emptied at once because the guest was about to run out of memory, since
    /// this daemon holds the VM.
    pub releases: u64,
    /// QEMU takes free pages by itself where the guest tells of them (free page reporting).
    pub reporting_offered: bool,
    /// The guest does; null: not known.
    pub reporting: Option<bool>,
    /// What the guest told of its memory by it; null: it did not.
    pub figures: Option<GuestFigures>,
}

/// What a guest tells of its memory through its balloon; null: not this.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct GuestFigures {
    /// How long ago, in seconds.
    pub age_s: u64,
    /// What its kernel manages, the balloon not included.
    pub total_bytes: Option<u64>,
    /// Free.
    pub free_bytes: Option<u64>,
    /// What it could use without going out of memory.
    pub available_bytes: Option<u64>,
    /// Its page cache.
    pub cache_bytes: Option<u64>,
    /// Read from its own swap space since it booted.
    pub swapped_in_bytes: Option<u64>,
    /// Written there since it booted.
    pub swapped_out_bytes: Option<u64>,
    /// Its faults that waited for a disk since it booted.
    pub major_faults: Option<u64>,
    /// Its other faults since it booted.
    pub minor_faults: Option<u64>,
}
