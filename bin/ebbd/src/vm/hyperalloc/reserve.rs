//! What a guest that shares its allocator keeps, whatever its target.

use std::time::{Duration, Instant};

use ebb_policy::need::MemoryFigures;
use ebb_reclaim::hyperalloc::HyperAlloc;
use ebb_units::{Bytes, FRAME_BYTES, HUGE_BYTES};

use crate::vm::context::VmContext;

/// How long a guest that had its memory returned is left alone.
const PAUSE: Duration = Duration::from_secs(30);
/// Memory of each zone that Linux itself keeps free (`set_recommended_min_free_kbytes` of
/// `mm/khugepaged.c`, and half as much again for its high watermark).
const ZONE_BYTES: u64 = 34 << 20;
/// Page cache of each zone that is not freed easily: this much, or half of the cache if that is
/// less. It is the low watermark, as in `si_mem_available` of `mm/page_alloc.c`.
const ZONE_CACHE_BYTES: u64 = 28 << 20;
/// Looking for the guest's page cache takes no more than one part in this many of a processor.
const LOOK_PART: u32 = 50;

/// When the reserve was looked at, and how long the guest is left alone.
#[derive(Default)]
pub struct Reserve {
    next_look: Option<Instant>,
    paused_until: Option<Instant>,
}

impl Reserve {
    /// Returns for how much longer nothing is reclaimed for a size.
    pub fn pause_left(&self) -> Option<Duration> {
        let left = self.paused_until?.saturating_duration_since(Instant::now());
        Some(left).filter(|left| !left.is_zero())
    }

    /// Whether it is time to look for the guest's page cache again.
    pub fn may_look(&self) -> bool {
        self.next_look.is_none_or(|at| Instant::now() >= at)
    }

    /// Starts over, because there is a new target or a new kernel runs.
    pub fn begin_again(&mut self) {
        *self = Reserve::default();
    }
}

/// Returns, for whoever asked for the size, why the guest cannot have less.
pub fn blocked_reason(used: Bytes, missing: Bytes) -> String {
    format!(
        "the guest needs what it has: {used} are in use, and without a reserve beside that it \
         would run out of memory; {missing} more were asked for"
    )
}

impl Reserve {
    /// Returns figures of the guest by its allocator's state and its page metadata; `None`: the
    /// guest is not known now.
    fn figures(&mut self, cx: &VmContext, shared: &HyperAlloc) -> Option<MemoryFigures> {
        let began = Instant::now();
        let guest = cx.guest.guest().ok()?;
        let cache_frames = guest.counts(&cx.pager.view()).file_frames;
        self.next_look = Some(began + (LOOK_PART + 1) * began.elapsed());
        Some(figures_with(cx, shared, cache_frames * FRAME_BYTES))
    }

    /// Returns how many huge frames can be hard-reclaimed from the guest.
    pub fn spare_huge(&mut self, cx: &VmContext, shared: &HyperAlloc) -> u64 {
        if self.pause_left().is_some() {
            return 0;
        }
        let figures = self.figures(cx, shared);
        figures.map_or(0, |figures| figures.spare_bytes() / HUGE_BYTES)
    }

    /// Returns all hard-reclaimed memory to a guest that is about to run out of memory.
    pub fn relieve(&mut self, cx: &VmContext, shared: &HyperAlloc) {
        let hard = shared.counts().hard_bytes / HUGE_BYTES;
        if hard == 0 || !self.may_look() {
            return;
        }
        // What is free is cheaper to learn than what is cache.
        if !figures_with(cx, shared, 0).is_pressed() {
            return;
        }
        if self.figures(cx, shared).is_some_and(|figures| figures.is_pressed()) {
            tracing::info!("its guest is about to run out of memory");
            shared.give(&cx.pager, hard);
            self.paused_until = Some(Instant::now() + PAUSE);
        }
    }
}

fn figures_with(cx: &VmContext, shared: &HyperAlloc, cache_bytes: u64) -> MemoryFigures {
    let total_bytes = cx.initial_bytes().saturating_sub(shared.counts().hard_bytes);
    let free_bytes = total_bytes.saturating_sub(shared.usage().used_bytes());
    let zones = shared.zone_count();
    let cache_bytes = cache_bytes - (cache_bytes / 2).min(zones * ZONE_CACHE_BYTES);
    let available_bytes = (free_bytes + cache_bytes).saturating_sub(zones * ZONE_BYTES);
    MemoryFigures { total_bytes, available_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_left_alone_until_there_is_a_new_target() {
        let until = Some(Instant::now() + PAUSE);
        let mut reserve = Reserve { paused_until: until, next_look: until };
        assert!(reserve.pause_left().is_some() && !reserve.may_look());
        reserve.begin_again();
        assert!(reserve.pause_left().is_none() && reserve.may_look());
    }
}
