//! What was done, and what went wrong.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{SizeMechanism, SizeState};

/// What one reclaim did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReclaimReport {
    /// Guest memory emptied by it.
    pub bytes: u64,
    /// In how many buddy blocks.
    pub blocks: u64,
    /// How long it took, the scan included.
    pub duration_ns: u64,
    /// The part of that spent reading the guest's metadata.
    pub scan_ns: u64,
    /// Why it took no more, in words.
    pub stopped_by: String,
    /// Candidates it did not take.
    pub skipped: Skipped,
}

/// Blocks that a reclaim looked at and left.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct Skipped {
    /// In use again at the second look.
    pub in_use: u64,
    /// They held no host memory.
    pub already_empty: u64,
    /// The guest wrote to their metadata while they were being taken.
    pub cancelled: u64,
}

/// What a detach brought back.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct DetachReport {
    /// Memory brought back by it.
    pub restored_bytes: u64,
    /// How long it took.
    pub duration_ns: u64,
}

/// What an eviction did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct EvictReport {
    /// Guest memory saved and emptied.
    pub saved_bytes: u64,
    /// The same in 4 KiB frames.
    pub saved_frames: u64,
    /// Frames that the guest wrote to on the way; they stayed.
    pub abandoned: u64,
    /// How long it took.
    pub duration_ns: u64,
    /// Why it took no more, in words.
    pub stopped_by: String,
}

/// What a change of a VM's size did so far.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ResizeReport {
    /// What the guest may have now, on that node if one was named.
    pub bytes: u64,
    /// What it is to have.
    pub wanted_bytes: u64,
    /// The NUMA node that this is about; null: all.
    pub node: Option<u32>,
    /// By what its size changes.
    pub mechanism: SizeMechanism,
    /// Why by this.
    pub reason: String,
    /// How far it is.
    pub state: SizeState,
    /// The least that the guest can have now without going out of memory, by its own figures;
    /// null: it tells nothing, or they were not asked for.
    pub least_bytes: Option<u64>,
    /// Taken from it by this.
    pub taken_bytes: u64,
    /// The host's memory that came free with that.
    pub emptied_bytes: u64,
    /// Given to it by this.
    pub returned_bytes: u64,
    /// How often it was asked to free its caches.
    pub purges: u32,
    /// How long it took, to where it is.
    pub duration_ns: u64,
    /// Why it goes no further, in words.
    pub stopped_by: String,
}

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// One line: what is wrong and what to do.
    pub error: String,
}

/// The daemon that answers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Its release.
    pub version: String,
    /// Its process.
    pub pid: i32,
    /// Its run directory.
    #[schema(value_type = String)]
    pub run_dir: PathBuf,
}
