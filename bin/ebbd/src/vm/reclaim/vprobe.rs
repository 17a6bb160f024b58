//! Passes over what is free by the guest's page metadata (V-Probe).

use std::time::{Duration, Instant};

use ebb_api::{Backing, Mode, ReclaimReport, Skipped};
use ebb_inspect::{BuddyBlock, RESERVE_BYTES};
use ebb_reclaim::resting::Resting;
use ebb_reclaim::vprobe::{self, Order, ReclaimedBlocks, VProbeStop};
use ebb_units::{Bytes, Gfn};

use crate::model::work::CANCELLED;
use crate::support::nanoseconds::nanoseconds;
use crate::vm::context::VmContext;
use crate::vm::context::liveness::{End, Liveness};
use crate::vm::context::mailbox::Which;
use crate::vm::context::work::Work;

/// Memory reclaimed at once with small pages, in bytes. A guest that wants memory of the batch
/// waits for all of it, about 2 ms.
const BATCH_SMALL_BYTES: u64 = 8 << 20;
/// Memory reclaimed at once with huge pages, in bytes. A guest that wants memory of the batch waits
/// a quarter as long as with small pages.
const BATCH_HUGE_BYTES: u64 = 64 << 20;

/// V-Probe on one VM. Keeps its buffer from one pass to the next.
#[derive(Default)]
pub struct VProbe {
    blocks: Vec<BuddyBlock>,
    resting: Resting,
}

/// What one or several passes did.
#[derive(Default)]
pub struct Pass {
    reclaimed: ReclaimedBlocks,
    stop: Option<VProbeStop>,
    /// The memory left to the guest.
    reserve_bytes: u64,
    is_cancelled: bool,
}

impl VProbe {
    /// The free memory that automatic reclaim leaves alone.
    #[cfg(test)]
    pub fn resting(&self) -> &Resting {
        &self.resting
    }

    /// Notes that a block came back, and whether the guest has used it since.
    pub fn note_restored(&mut self, head: Gfn, is_used: bool) {
        self.resting.note(head, is_used, Instant::now());
    }

    /// Makes one pass. Also returns why the guest's kernel does not run any more, if that was seen.
    pub fn pass(
        &mut self,
        cx: &mut VmContext,
        want_bytes: u64,
        keep_bytes: u64,
        which: Which,
        work: &Work,
    ) -> (Pass, Option<End>) {
        self.resting.forget_old(Instant::now());
        let reserve_bytes = RESERVE_BYTES.max(keep_bytes);
        let order = Order {
            mode: match cx.record.mode {
                Mode::Strict => vprobe::Mode::Strict,
                Mode::Release => vprobe::Mode::Release,
            },
            min_order: cx.record.min_order,
            reserve_bytes,
            want_bytes,
            batch_bytes: match cx.record.backing {
                Backing::Small => BATCH_SMALL_BYTES,
                _ => BATCH_HUGE_BYTES,
            },
            resting: (which == Which::Lasting).then_some(&self.resting),
        };
        let VmContext { qmp, guest, reaching, pager, .. } = cx;
        let mut liveness = Liveness::new(qmp, guest, reaching, pager);
        let still_runs = |so_far: &ReclaimedBlocks| {
            note(work, so_far, want_bytes);
            !work.is_cancelled() && liveness.runs_at_once()
        };
        let (reclaimed, stop) = match guest.kernel() {
            Ok(kernel) => {
                let blocks = &mut self.blocks;
                vprobe::reclaim(pager, kernel.free_blocks(), order, blocks, still_runs)
            }
            Err(_) => (ReclaimedBlocks::default(), Some(VProbeStop::Unknown)),
        };
        let is_cancelled = work.is_cancelled();
        (Pass { reclaimed, stop, reserve_bytes, is_cancelled }, liveness.ended())
    }
}

/// Notes how far a pass is: how much of what was asked for is reclaimed, or how much of all that is
/// free was looked at.
fn note(work: &Work, so_far: &ReclaimedBlocks, want_bytes: u64) {
    match want_bytes {
        u64::MAX => work.note(so_far.seen_bytes, Some(so_far.found_bytes)),
        _ => work.note(so_far.bytes, Some(want_bytes)),
    }
}

impl Pass {
    /// Returns the reclaimed bytes.
    pub fn bytes(&self) -> u64 {
        self.reclaimed.bytes
    }

    /// Whether it ended because no answer came in time whether the guest still runs.
    pub fn is_cut_short(&self) -> bool {
        matches!(self.stop, Some(VProbeStop::Unknown)) && !self.is_cancelled
    }

    /// Adds the next pass to this one.
    pub fn and_then(self, next: Pass) -> Pass {
        Pass { reclaimed: self.reclaimed.and_then(next.reclaimed), ..next }
    }

    /// Makes the report for the client.
    pub fn report(self, want_bytes: u64, took: Duration) -> ReclaimReport {
        let stopped_by = self.what_stopped_it(want_bytes);
        let Pass { reclaimed, .. } = self;
        ReclaimReport {
            bytes: reclaimed.bytes,
            blocks: reclaimed.blocks,
            duration_ns: nanoseconds(took),
            scan_ns: nanoseconds(reclaimed.scan),
            stopped_by,
            skipped: Skipped {
                in_use: reclaimed.in_use,
                already_empty: reclaimed.already_empty,
                cancelled: reclaimed.cancelled,
            },
        }
    }

    fn what_stopped_it(&self, want_bytes: u64) -> String {
        let Pass { reclaimed, stop, reserve_bytes, is_cancelled } = self;
        let reserve = format!("the reserve of {}", Bytes(*reserve_bytes));
        match stop {
            Some(VProbeStop::Unknown) if *is_cancelled => CANCELLED.into(),
            Some(stop) => stop.to_string(),
            None if reclaimed.bytes >= want_bytes => "the amount asked for was reached".into(),
            None if reclaimed.bytes == 0 && reclaimed.already_empty > 0 => format!(
                "all free memory is with the host already, but {reserve} and what is free in \
                 smaller blocks"
            ),
            None => format!("nothing more is free above {reserve}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_reclaimed_before_is_reported() {
        let pass = |bytes, already_empty, reserve_bytes| Pass {
            reclaimed: ReclaimedBlocks { bytes, already_empty, ..ReclaimedBlocks::default() },
            stop: None,
            reserve_bytes,
            is_cancelled: false,
        };
        let message = pass(0, 3, RESERVE_BYTES).what_stopped_it(u64::MAX);
        assert!(message.starts_with("all free memory is with the host already"), "{message}");
        assert!(message.contains("the reserve of 64 MiB"), "{message}");
        let message = pass(4096, 3, 512 << 20).what_stopped_it(u64::MAX);
        assert_eq!(message, "nothing more is free above the reserve of 512 MiB");
        assert_eq!(pass(0, 0, 1 << 20).and_then(pass(0, 1, 2 << 20)).reserve_bytes, 2 << 20);
        assert!(pass(8192, 0, 0).what_stopped_it(8192).contains("was reached"));
    }

    #[test]
    fn no_request_asks_for_blocks_that_are_never_reclaimed() {
        assert_eq!(ebb_api::MIN_ORDER_LEAST, vprobe::MIN_ORDER_LOWEST);
    }
}
