//! A change to a size that was asked for: the guest gives up memory step by step.

use std::time::{Duration, Instant};

use ebb_reclaim::hyperalloc::{How, HyperAlloc};
use ebb_units::{FRAMES_PER_HUGE, HUGE_BYTES};

use super::gap::{Gap, PIECE_HUGE, what_it_needs};
use super::pass::take;
use super::reserve::Reserve;
use crate::vm::context::VmContext;
use crate::vm::context::liveness::End;
use crate::vm::context::shared_size::SharedChange;
use crate::vm::context::work::Work;

/// A guest that has not tried to free memory within this time does not do it.
const PURGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two looks whether the guest has tried.
const PURGE_POLL: Duration = Duration::from_millis(10);
/// Most purges for one size. Each asks for twice as much, since the guest frees memory in pieces.
const PURGES_MAX: u32 = 5;

/// A change to a size that was asked for and is not reached yet.
#[derive(Default)]
pub(super) struct Shrink {
    /// When the guest was asked to free its caches, if it has not tried yet.
    asked: Option<Instant>,
    purges: u32,
}

impl Shrink {
    /// Returns the time to its next step.
    pub(super) fn step_after(&self) -> Duration {
        if self.asked.is_some() { PURGE_POLL } else { Duration::ZERO }
    }

    /// Returns how often the guest was asked to free its caches.
    pub(super) fn purges(&self) -> u32 {
        self.purges
    }

    /// Makes a step. Returns why it does not go on, or that the size is reached; `None`: it goes
    /// on. Also returns why the guest's kernel does not run any more, if that was seen.
    pub(super) fn step(
        &mut self,
        cx: &mut VmContext,
        shared: &HyperAlloc,
        reserve: &mut Reserve,
        change: &mut SharedChange,
    ) -> (Option<String>, Option<End>) {
        if let Some(asked) = self.asked {
            match (shared.has_purged(), shared.is_there() && asked.elapsed() < PURGE_TIMEOUT) {
                (true, _) => self.asked = None,
                (false, true) => return (None, None),
                (false, false) => {
                    let why = Gap::of(cx, shared).blocked_reason(shared);
                    let silent = "the guest does not answer when it is asked to free its caches";
                    return (Some(format!("{silent}; {why}")), None);
                }
            }
        }
        let gap = Gap::of(cx, shared);
        let missing = gap.missing();
        if missing == 0 {
            return (Some("the target was reached".into()), None);
        }
        let want = missing.min(reserve.spare_huge(cx, shared));
        if want < missing.min(PIECE_HUGE) {
            return (Some(what_it_needs(cx, shared, gap)), None);
        }
        let (taken, stop, ended) = take(cx, shared, How::Hard, want, 0, &Work::default());
        change.taken_bytes += taken.huge_frames * HUGE_BYTES;
        change.reclaimed_bytes += taken.reclaimed_bytes;
        if let Some(stop) = stop {
            return (Some(stop.to_string()), ended);
        }
        let left = want.saturating_sub(taken.huge_frames);
        if left > 0 && self.purges == PURGES_MAX {
            return (Some(Gap::of(cx, shared).blocked_reason(shared)), ended);
        }
        if left > 0 {
            shared.ask_purge((left * FRAMES_PER_HUGE) << self.purges);
            self.purges += 1;
            self.asked = Some(Instant::now());
        }
        (None, ended)
    }
}
