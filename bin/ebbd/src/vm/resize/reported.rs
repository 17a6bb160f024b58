//! What a guest tells of its memory, and the clock that dates it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ebb_policy::need::MemoryFigures;
use ebb_policy::resize::Driver;
use ebb_units::FRAME_BYTES;

use super::progress::Progress;
use crate::vm::context::VmContext;
use crate::vm::context::capabilities::Capabilities;

/// A guest that has reported no figures for this long counts as one that reports none.
const SILENCE: Duration = Duration::from_secs(5);

/// What a guest says of its memory.
pub(super) enum Reported {
    /// These figures.
    Figures(MemoryFigures),
    /// Nothing yet about the memory that it has now.
    NotYet,
    /// There is nobody who could say anything.
    Nobody,
}

/// Returns the time in seconds since 1970.
pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns what the guest tells of the memory that it has now.
pub(super) fn figures(cx: &VmContext, progress: Option<&Progress>) -> Reported {
    let since_s = progress.map_or(0, Progress::figures_since_s);
    let found = cx.capabilities.as_ref();
    if let Some(figures) = found.and_then(|found| found.figures(since_s)) {
        return Reported::Figures(figures);
    }
    let balloon = found.and_then(Capabilities::balloon_part);
    let may_tell = balloon.is_some_and(|balloon| balloon.driver != Driver::Absent);
    let is_silent = progress.is_some_and(|progress| progress.since_change() > SILENCE);
    if may_tell && !is_silent {
        return Reported::NotYet;
    }
    // Without a balloon that tells: what the guest's metadata says. Shared memory counts as
    // cache.
    let Ok(guest) = cx.guest.guest() else {
        return if may_tell { Reported::NotYet } else { Reported::Nobody };
    };
    let view = cx.pager.view();
    let counts = guest.counts(&view);
    let free = guest.free_bytes(&view).unwrap_or(0);
    Reported::Figures(MemoryFigures {
        total_bytes: guest.memmap().frames() * FRAME_BYTES,
        available_bytes: free + counts.file_frames * FRAME_BYTES,
    })
}
