//! A pass over the shared allocator that reclaims free huge frames.

use ebb_reclaim::hyperalloc::{How, HyperAlloc, HyperAllocStop, ReclaimedHuge};
use ebb_units::{Bytes, HUGE_BYTES};

use crate::vm::context::VmContext;
use crate::vm::context::liveness::{End, Liveness};
use crate::vm::context::work::Work;

/// Reclaims free huge frames while the guest's kernel runs.
pub(super) fn take(
    cx: &mut VmContext,
    shared: &HyperAlloc,
    how: How,
    want: u64,
    keep: u64,
    work: &Work,
) -> (ReclaimedHuge, Option<HyperAllocStop>, Option<End>) {
    let VmContext { qmp, guest, reaching, pager, .. } = cx;
    let mut liveness = Liveness::new(qmp, guest, reaching, pager);
    let want_bytes = Some(want.saturating_mul(HUGE_BYTES)).filter(|&bytes| bytes < u64::MAX);
    let goes_on = |so_far: &ReclaimedHuge| {
        work.note(so_far.huge_frames * HUGE_BYTES, want_bytes);
        !work.is_cancelled() && liveness.runs()
    };
    let (reclaimed, stop) = shared.reclaim(pager, how, want, keep, goes_on);
    let ended = liveness.ended();
    cx.note_reclaimed(reclaimed.reclaimed_bytes);
    (reclaimed, stop, ended)
}

/// Returns why no more is reclaimed from a guest that keeps `keep` huge frames while `soft_bytes`
/// are soft-reclaimed.
pub(super) fn nothing_more(reclaimed: &ReclaimedHuge, soft_bytes: u64, keep: u64) -> String {
    let kept = match keep {
        0 => String::new(),
        huge => format!(", but the {} that it keeps", Bytes(huge * HUGE_BYTES)),
    };
    match reclaimed.reclaimed_bytes == 0 && soft_bytes > 0 {
        true => format!("all free memory in whole huge frames is with the host already{kept}"),
        false => format!("nothing more is free in whole huge frames{kept}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_reclaimed_before_is_reported() {
        let reclaimed =
            |reclaimed_bytes| ReclaimedHuge { reclaimed_bytes, ..ReclaimedHuge::default() };
        let message = nothing_more(&reclaimed(0), HUGE_BYTES, 2);
        let expected = "with the host already, but the 4 MiB that it keeps";
        assert!(message.contains(expected), "{message}");
        for (reclaimed_bytes, soft_bytes) in [(HUGE_BYTES, HUGE_BYTES), (0, 0)] {
            let message = nothing_more(&reclaimed(reclaimed_bytes), soft_bytes, 0);
            assert_eq!(message, "nothing more is free in whole huge frames");
        }
    }
}
