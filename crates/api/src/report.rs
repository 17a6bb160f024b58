//! What was done, and what went wrong.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{SizeMechanism, SizeState};

/// What one reclaim did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReclaimReport {
    /// Reclaimed memory.
    pub bytes: u64,
    /// Number of buddy blocks that it was in.
    pub blocks: u64,
    /// Duration in nanoseconds, including the scan.
    pub duration_ns: u64,
    /// The part of it that was spent on reading page metadata.
    pub scan_ns: u64,
    /// Why it reclaimed no more, in words.
    pub stopped_by: String,
    /// Blocks that were not reclaimed.
    pub skipped: Skipped,
}

/// Blocks that a reclaim looked at and did not reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct Skipped {
    /// Blocks that were in use at the second look.
    pub in_use: u64,
    /// Blocks without host memory.
    pub already_empty: u64,
    /// Blocks whose page metadata the guest wrote to meanwhile.
    pub cancelled: u64,
}

/// What a detach brought back.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct DetachReport {
    /// Memory that was brought back.
    pub restored_bytes: u64,
    /// Duration in nanoseconds.
    pub duration_ns: u64,
}

/// What an eviction did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct EvictReport {
    /// Evicted memory.
    pub saved_bytes: u64,
    /// The same in frames of 4 KiB.
    pub saved_frames: u64,
    /// Frames that stayed because the guest wrote to them meanwhile.
    pub abandoned: u64,
    /// Duration in nanoseconds.
    pub duration_ns: u64,
    /// Why it evicted no more, in words.
    pub stopped_by: String,
}

/// Progress of a resize.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ResizeReport {
    /// Size of the VM now, or of the node if one is named.
    pub bytes: u64,
    /// The target.
    pub wanted_bytes: u64,
    /// NUMA node of the target; null: the whole VM.
    pub node: Option<u32>,
    /// The mechanism for the target.
    pub mechanism: SizeMechanism,
    /// Why this mechanism.
    pub reason: String,
    /// Progress to the target.
    pub state: SizeState,
    /// The least that the guest can have now without running out of memory, by its own figures;
    /// null: it does not report them, or they were not needed.
    pub least_bytes: Option<u64>,
    /// Memory that this resize has taken from the guest.
    pub taken_bytes: u64,
    /// Host memory that became free thereby.
    pub emptied_bytes: u64,
    /// Memory that this resize has given to the guest.
    pub returned_bytes: u64,
    /// How often the guest was asked to free its caches.
    pub purges: u32,
    /// Time from the request to the last progress, in nanoseconds.
    pub duration_ns: u64,
    /// Why it goes no further, in words: the target was reached, or the blocked reason.
    pub stopped_by: String,
}

/// The daemon that answers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// The daemon's release.
    pub version: String,
    /// The daemon's process number.
    pub pid: i32,
    /// The daemon's run directory.
    #[schema(value_type = String)]
    pub run_dir: PathBuf,
}
