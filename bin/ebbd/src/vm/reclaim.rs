//! Reclaiming the guest's free memory by its page metadata (V-Probe), and automatic reclaim by
//! whatever finds free memory.

#[cfg(test)]
mod tests;
mod trigger;
mod vprobe;

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_api::{AutoRequest, AutoStatus, Backing, Mechanism, ReclaimReport};
use ebb_pager::Latency;
use ebb_units::{Bytes, Gfn};

use self::trigger::Trigger;
use self::vprobe::VProbe;
use super::context::VmContext;
use super::context::kernel::Kernel;
use super::context::liveness::End;
use super::context::mailbox::Which;
use super::context::work::Work;
use crate::model::api_error::{Answer, not_allowed, not_trusted};
use crate::model::host_pressure::PressureNotice;
use crate::system::host_memory;

pub use self::vprobe::Pass;

/// Order of the largest block of a buddy allocator.
const LARGEST_ORDER: u8 = 10;

/// The controller of one VM's reclaim.
pub struct Reclaim {
    trigger: Trigger,
    last: Option<ReclaimReport>,
    vprobe: VProbe,
    /// How long each reclaim took, whatever it found.
    times: Latency,
}

impl Default for Reclaim {
    fn default() -> Reclaim {
        Reclaim {
            trigger: Trigger::new(Instant::now()),
            last: None,
            vprobe: VProbe::default(),
            times: Latency::default(),
        }
    }
}

impl Reclaim {
    /// Succeeds if anything can be reclaimed from this guest. `is_trusted`: it was confirmed just
    /// now.
    ///
    /// # Errors
    /// Why nothing can.
    pub fn may_reclaim(&self, cx: &VmContext, is_trusted: bool) -> Answer<()> {
        if is_trusted && cx.guest.shares_allocator() {
            return Ok(());
        }
        if cx.record.backing == Backing::Hugetlb {
            return Err(not_allowed(
                "hugetlb pages cannot be write-protected 4 KiB at a time, so the guest's metadata \
                 cannot be watched: start the VM with --backing thp",
            ));
        }
        let why = cx.guest.kernel().err().unwrap_or_default();
        match is_trusted {
            true => Ok(()),
            false => Err(not_trusted(why)),
        }
    }

    /// Makes one pass over what is free by the guest's page metadata.
    pub fn pass(
        &mut self,
        cx: &mut VmContext,
        want_bytes: u64,
        keep_bytes: u64,
        which: Which,
        work: &Work,
    ) -> (Pass, Option<End>) {
        let (pass, ended) = self.vprobe.pass(cx, want_bytes, keep_bytes, which, work);
        cx.note_reclaimed(pass.bytes());
        (pass, ended)
    }

    /// Whether a round of automatic reclaim at intervals is due. If so, the next one is due after
    /// the interval.
    pub fn is_due(&mut self, cx: &VmContext) -> bool {
        self.trigger.is_due(&cx.record.auto, Instant::now())
    }

    /// Notes what `ebbd` says of the host. Returns why a round of automatic reclaim is to begin;
    /// none: none is.
    pub fn hear(&mut self, cx: &VmContext, notice: PressureNotice) -> Option<String> {
        self.trigger.hear(&cx.record.auto, notice, Instant::now())
    }

    /// Whether more free memory would serve automatic reclaim now.
    pub fn wants_more(&self, cx: &VmContext) -> bool {
        self.trigger.is_wanted(&cx.record.auto, Instant::now())
    }

    /// Notes a round of automatic reclaim. `why`: host pressure began it, with the figures.
    pub fn note_auto(&mut self, report: ReclaimReport, why: Option<String>) {
        self.last = Some(report);
        if let Some(why) = why {
            self.trigger.note_round(why, Instant::now());
        }
    }

    /// Notes how long a reclaim took, by itself or on request.
    pub fn note_time(&self, report: &ReclaimReport) {
        self.times.record(Duration::from_nanos(report.duration_ns));
    }

    /// How long reclaims took.
    pub fn times(&self) -> &Latency {
        &self.times
    }

    /// Turns automatic reclaim on or off.
    ///
    /// # Errors
    /// The request makes no sense for this VM, the host has less memory than the threshold, or the
    /// record cannot be written.
    pub fn set_auto(&mut self, cx: &mut VmContext, request: AutoRequest) -> Answer<AutoStatus> {
        cx.record.auto.check(request)?;
        request.below_bytes.map_or(Ok(()), has)?;
        cx.record.change(|record| record.auto.set(request))?;
        self.trigger.begin(Instant::now());
        Ok(self.auto_status(cx))
    }

    /// Returns the status of automatic reclaim.
    pub fn auto_status(&self, cx: &VmContext) -> AutoStatus {
        let auto = cx.record.auto;
        let is_trusted = cx.guest.kernel().is_ok();
        let may = cx.may_take().and_then(|()| self.may_reclaim(cx, is_trusted));
        AutoStatus {
            on: auto.on,
            when: auto.when,
            interval_ms: auto.interval_ms,
            below_percent: auto.percent(),
            below_bytes: auto.below_bytes,
            keep_bytes: auto.keep_bytes,
            last: self.last.clone(),
            stuck: may.err().filter(|_| auto.on).map(|why| why.to_string()),
            pressure: self.trigger.status(&auto, Instant::now()),
        }
    }

    /// Counts blocks that were given back although the guest did not need them: they are still
    /// free. Automatic reclaim leaves them alone for a while.
    pub fn judge_restored(&mut self, cx: &VmContext) {
        let Ok(kernel) = cx.guest.kernel() else { return };
        let view = cx.pager.view();
        for block in cx.restored.try_iter() {
            // It may be a part of a larger free block by now.
            let mut look = kernel.free_blocks().heads(&view);
            let mut is_free_at = |order: u8| {
                let head = Gfn(block.head.0 >> order << order);
                look(head).is_some_and(|now| now.order >= order)
            };
            let is_used = !(block.order..=LARGEST_ORDER).any(&mut is_free_at);
            if !is_used {
                cx.pager.counters().spurious.fetch_add(1, Relaxed);
            }
            self.vprobe.note_restored(block.head, is_used);
        }
    }

    /// Returns how free memory is found in a guest that does not share its allocator, and why that
    /// way.
    pub fn mechanism(&self, cx: &VmContext) -> (Mechanism, String) {
        match cx.guest.kernel() {
            Err(why) => (Mechanism::None, format!("the guest is not trusted: {why}")),
            Ok(Kernel::Inspected(_)) => (
                Mechanism::VProbe,
                "its kernel has a buddy allocator, whose metadata is known".into(),
            ),
            Ok(Kernel::Registered(_)) => {
                (Mechanism::VProbe, "its kernel has registered its page metadata".into())
            }
        }
    }
}

/// Checks that this host, and each control group around the VMs, has as much memory as a threshold
/// of it.
fn has(below_bytes: u64) -> Answer<()> {
    match host_memory::totals().into_iter().find(|(_, bytes)| *bytes < below_bytes) {
        Some((name, bytes)) => Err(not_allowed(format!(
            "{name} has {}, less than the threshold of {}: give less, or 100%",
            Bytes(bytes),
            Bytes(below_bytes)
        ))),
        None => Ok(()),
    }
}
