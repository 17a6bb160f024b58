//! A VM's balloon, and what the guest tells through it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::DriverState;

/// A VM's balloon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct BalloonStatus {
    /// What the balloon holds.
    pub ballooned_bytes: u64,
    /// Whether the guest drives the balloon.
    pub driver: DriverState,
    /// The guest takes memory out of the balloon before it kills a process.
    pub deflates_on_oom: bool,
    /// How often Ebb emptied the balloon at once because the guest was about to run out of memory;
    /// counted by the VM's current process.
    pub releases: u64,
    /// QEMU offers free page reporting: it frees pages that the guest reports as free.
    pub reporting_offered: bool,
    /// Whether the guest reports free pages; null: QEMU does not tell.
    pub reporting: Option<bool>,
    /// What the guest reports of its memory through the balloon; null: nothing yet.
    pub figures: Option<GuestFigures>,
}

/// What a guest reports of its memory through its balloon; null: it does not report this.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct GuestFigures {
    /// Age of these figures, in seconds.
    pub age_s: u64,
    /// What the guest's kernel manages, without the balloon.
    pub total_bytes: Option<u64>,
    /// Free memory.
    pub free_bytes: Option<u64>,
    /// What the guest could use without running out of memory.
    pub available_bytes: Option<u64>,
    /// Page cache.
    pub cache_bytes: Option<u64>,
    /// Read from its own swap space since it booted.
    pub swapped_in_bytes: Option<u64>,
    /// Written to its own swap space since it booted.
    pub swapped_out_bytes: Option<u64>,
    /// Its faults that waited for a disk since it booted.
    pub major_faults: Option<u64>,
    /// Its other faults since it booted.
    pub minor_faults: Option<u64>,
}
