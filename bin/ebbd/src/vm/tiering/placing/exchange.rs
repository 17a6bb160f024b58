//! What a VM's worker and its placing thread tell each other: jobs and figures.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::vm::tiering::order::Known;

pub(super) enum Job {
    /// Place by what is known now.
    Known(Known),
    /// Place by what was known before. Memory that came since counts as the coldest.
    Again,
}

#[derive(Default)]
pub(super) struct PlacerState {
    pub(super) is_ended: AtomicBool,
    pub(super) is_busy: AtomicBool,
    figures: Mutex<PlacementFigures>,
}

/// What the thread has done.
#[derive(Clone, Default, Debug)]
pub struct PlacementFigures {
    /// Memory of the VM on each node when its pages were last placed, in bytes, fastest node first.
    pub held_bytes: Vec<u64>,
    /// Bytes moved so far, in both directions.
    pub moved_bytes: u64,
    /// Monitorings by which the pages were placed.
    pub(super) rounds: u64,
    /// Frames that found no room on their node the last time.
    pub(super) no_room_frames: u64,
    /// Why the pages are not placed.
    pub failed: Option<String>,
}

impl PlacerState {
    pub(super) fn figures(&self) -> MutexGuard<'_, PlacementFigures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
