//! What stays with a guest that shares its allocator, whatever size is wished for.

use std::time::{Duration, Instant};

use ebb_policy::need::Figures;
use ebb_reclaim::hyperalloc::HyperAlloc;
use ebb_units::{Bytes, FRAME_BYTES, HUGE_BYTES};

use crate::vm::context::VmContext;

/// A guest that had its memory back is left alone for so long.
const REST: Duration = Duration::from_secs(30);
/// What Linux itself keeps free of each zone (`set_recommended_min_free_kbytes` of
/// `mm/khugepaged.c`, and half as much again for its high watermark).
const ZONE_BYTES: u64 = 34 << 20;
/// So much page cache of each zone, or half of it, does not go easily: its low watermark, as in
/// `si_mem_available` of `mm/page_alloc.c`.
const ZONE_CACHE_BYTES: u64 = 28 << 20;
/// Looking for its page cache takes no more than this part of a processor.
const LOOK_PART: u32 = 50;

/// When it was looked, and who rests.
#[derive(Default)]
pub struct Reserve {
    next_look: Option<Instant>,
    rests_until: Option<Instant>,
}

impl Reserve {
    /// How long nothing is taken for a size.
    pub fn rests_for(&self) -> Option<Duration> {
        let left = self.rests_until?.saturating_duration_since(Instant::now());
        Some(left).filter(|left| !left.is_zero())
    }

    /// Whether it is time to look for its page cache again.
    pub fn may_look(&self) -> bool {
        self.next_look.is_none_or(|at| Instant::now() >= at)
    }

    /// A new size is wished for, or a new kernel runs.
    pub fn begin_again(&mut self) {
        *self = Reserve::default();
    }
}

/// In the words of whoever asked for the size.
pub fn in_the_way(used: Bytes, missing: Bytes) -> String {
    format!(
        "the guest needs what it has: {used} are in use, and without a reserve beside that it \
         would run out of memory; {missing} more were asked for"
    )
}

impl Reserve {
    /// Figures of the guest by the state of its allocator and its page metadata; none: it is not
    /// known now.
    fn figures(&mut self, cx: &VmContext, shared: &HyperAlloc) -> Option<Figures> {
        let began = Instant::now();
        let guest = cx.guest.guest().ok()?;
        let cache_frames = guest.counts(&cx.pager.view()).file_frames;
        self.next_look = Some(began + (LOOK_PART + 1) * began.elapsed());
        Some(figures_with(cx, shared, cache_frames * FRAME_BYTES))
    }

    /// Huge frames that can be taken from the guest for good.
    pub fn spare_huge(&mut self, cx: &VmContext, shared: &HyperAlloc) -> u64 {
        if self.rests_for().is_some() {
            return 0;
        }
        let figures = self.figures(cx, shared);
        figures.map_or(0, |figures| figures.spare_bytes() / HUGE_BYTES)
    }

    /// Gives a guest everything back that is about to run out of memory.
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
            tracing::info!("{}: its guest is about to run out of memory", cx.name());
            shared.give(&cx.pager, hard);
            self.rests_until = Some(Instant::now() + REST);
        }
    }
}

fn figures_with(cx: &VmContext, shared: &HyperAlloc, cache_bytes: u64) -> Figures {
    let total_bytes = cx.initial_bytes().saturating_sub(shared.counts().hard_bytes);
    let free_bytes = total_bytes.saturating_sub(shared.usage().used_bytes());
    let zones = shared.zone_count();
    let cache_bytes = cache_bytes - (cache_bytes / 2).min(zones * ZONE_CACHE_BYTES);
    let available_bytes = (free_bytes + cache_bytes).saturating_sub(zones * ZONE_BYTES);
    Figures { total_bytes, available_bytes }
}
