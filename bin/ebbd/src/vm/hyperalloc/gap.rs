//! The gap between the size on record and what a guest has, and why it stays.

use ebb_api::{Fragmentation, KindBytes};
use ebb_reclaim::hyperalloc::{HyperAlloc, KindUsage};
use ebb_units::{Bytes, HUGE_BYTES};

use super::reserve;
use crate::vm::context::VmContext;

/// Fewest huge frames to hard-reclaim at once: the guest asks for some all the time.
pub(super) const PIECE_HUGE: u64 = 4;

/// The gap between the size on record and what the guest has, in huge frames.
#[derive(Clone, Copy)]
pub(super) struct Gap {
    wanted_hard: u64,
    hard: u64,
}

impl Gap {
    pub(super) fn of(cx: &VmContext, shared: &HyperAlloc) -> Gap {
        let hard = shared.counts().hard_bytes / HUGE_BYTES;
        Gap { wanted_hard: cx.wanted_hard(), hard }
    }

    pub(super) fn missing(self) -> u64 {
        self.wanted_hard.saturating_sub(self.hard)
    }

    pub(super) fn surplus(self) -> u64 {
        self.hard.saturating_sub(self.wanted_hard)
    }

    pub(super) fn blocked_reason(self, shared: &HyperAlloc) -> String {
        let all = fragmentation(shared);
        let kinds = [all.unmovable, all.movable, all.huge];
        let [huge, used] = [|kind: &KindBytes| kind.huge_bytes, |kind: &KindBytes| kind.used_bytes]
            .map(|bytes| Bytes(kinds.iter().map(bytes).sum()));
        format!(
            "{} more are not free in whole huge frames: {used} are in use, in {huge} of them",
            Bytes(self.missing() * HUGE_BYTES)
        )
    }
}

/// Returns why the guest cannot spare what is missing.
pub(super) fn what_it_needs(cx: &VmContext, shared: &HyperAlloc, gap: Gap) -> String {
    if cx.guest.guest().is_err() {
        return "the guest is not trusted, so nothing more is reclaimed from it".into();
    }
    let used = Bytes(shared.usage().used_bytes());
    reserve::blocked_reason(used, Bytes(gap.missing() * HUGE_BYTES))
}

/// Returns how much memory of each kind is in use, and in how many huge frames.
pub(super) fn fragmentation(shared: &HyperAlloc) -> Fragmentation {
    let usage = shared.usage();
    let bytes =
        |kind: KindUsage| KindBytes { huge_bytes: kind.huge_bytes, used_bytes: kind.used_bytes };
    Fragmentation {
        unmovable: bytes(usage.unmovable),
        movable: bytes(usage.movable),
        huge: bytes(usage.huge),
    }
}
