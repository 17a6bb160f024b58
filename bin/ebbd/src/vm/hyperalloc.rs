//! A guest that shares its allocator (HyperAlloc): its free memory, and its part of the size.

mod compaction;
mod gap;
mod pass;
mod reserve;
mod shrink;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Release};
use std::time::{Duration, Instant};

use ebb_api::{FaultTimes, Mechanism, OnViolation, ReclaimReport, SharingStatus, Skipped};
use ebb_inspect::LlfreeZone;
use ebb_pager::{Latency, Zeros};
use ebb_reclaim::hyperalloc::{How, HyperAlloc, HyperAllocStop};
use ebb_units::HUGE_BYTES;
use ebb_vm::qmp::Ears;

use self::compaction::Compaction;
use self::gap::{Gap, PIECE_HUGE, fragmentation, what_it_needs};
use self::pass::{nothing_more, take};
use self::reserve::Reserve;
use self::shrink::Shrink;
use crate::model::api_error::{Answer, not_allowed, not_trusted};
use crate::model::work::CANCELLED;
use crate::support::nanoseconds::nanoseconds;
use crate::vm::context::VmContext;
use crate::vm::context::liveness::End;
use crate::vm::context::mailbox::Command;
use crate::vm::context::shared_size::{SharedChange, SharedSize};
use crate::vm::context::work::Work;

/// Time between two looks for what a size lacks.
const MISSING_EVERY: Duration = Duration::from_secs(1);

/// The controller of one VM's shared allocator.
#[derive(Default)]
pub struct SharedAllocator {
    /// The allocator, while it is shared.
    shared: Option<Arc<HyperAlloc>>,
    /// Why it is not shared, though the guest announces it.
    refused: Option<String>,
    /// A violation was reported, and the worker has not looked at it yet.
    violation_reported: Arc<AtomicBool>,
    /// Why the VM was stopped.
    stopped: Option<String>,
    /// When the size was last checked.
    checked: Option<Instant>,
    reserve: Reserve,
    compaction: Compaction,
    /// The change to a size that was asked for, while it goes on.
    shrink: Option<Shrink>,
    /// What the last such change did.
    last_change: SharedChange,
}

/// The result of a step towards the size on record.
pub struct SizeStep {
    /// Why it does not go on, or that the size is reached; `None`: it goes on.
    pub blocked_reason: Option<String>,
    /// Why the guest's kernel does not run any more, if that was seen.
    pub ended: Option<End>,
}

/// What is to be done for the size on record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wants {
    /// Nothing.
    Nothing,
    /// The guest has more than its size. It can be reclaimed once the guest is confirmed.
    Take,
    /// The guest has less than its size.
    Give,
}

/// Succeeds if the words of a guest's allocator may be changed. QEMU knows nothing of what Ebb
/// writes there, and sends no page again for it: its destination would have a part of the change.
fn may_change(cx: &VmContext) -> Answer<()> {
    cx.may_take()?;
    match cx.reaching.migration.is_under_way() {
        false => Ok(()),
        true => Err(not_allowed(
            "its guest migrates, and its allocator is left as it is until that is over \
             (docs/hyperalloc.md)",
        )),
    }
}

impl SharedAllocator {
    /// Returns the shared allocator of a guest that was just confirmed. From now on it is watched,
    /// also by later processes.
    ///
    /// # Errors
    /// Nothing may be reclaimed, or the guest does not share its allocator.
    fn share(&mut self, cx: &mut VmContext) -> Answer<Arc<HyperAlloc>> {
        may_change(cx)?;
        if let Some(shared) = &self.shared {
            return Ok(Arc::clone(shared));
        }
        let zones = cx.guest.guest().map(|guest| guest.llfree().to_vec());
        let zones = zones.map_err(not_trusted)?;
        let shared = self.share_with(cx, &zones);
        self.refused = shared.as_ref().err().map(ToString::to_string);
        shared
    }

    fn share_with(&mut self, cx: &mut VmContext, zones: &[LlfreeZone]) -> Answer<Arc<HyperAlloc>> {
        if zones.is_empty() {
            return Err(not_allowed(
                "the guest's kernel does not share its allocator: it needs one with LLFree \
                 (docs/hyperalloc.md)",
            ));
        }
        if !cx.qmp.hears_at_once() {
            return Err(not_allowed(
                "its allocator can only be shared if Ebb hears of resets at once: libvirt passes \
                 them on late, so give the domain a second monitor (docs/cli.md, ebb attach)",
            ));
        }
        cx.record.change(|record| record.shares = true)?;
        cx.watch_all()?;
        let headers: Vec<_> = zones.iter().map(|zone| zone.header).collect();
        let shared = HyperAlloc::attach(&cx.pager, &headers).map_err(not_allowed)?;
        let (reported, mailbox) = (Arc::clone(&self.violation_reported), cx.mailbox.clone());
        shared.on_violation(move || {
            if !reported.swap(true, AcqRel) {
                mailbox.put(Command::Violation);
            }
        });
        let ears = cx.qmp.ears();
        shared.ask_of_reset(move || ears.as_ref().is_none_or(Ears::may_have_heard_reset));
        self.shared = Some(Arc::clone(&shared));
        Ok(shared)
    }

    /// Checks that the allocator can be shared, before a size depends on that.
    ///
    /// # Errors
    /// As [`SharedAllocator::take_soft`].
    pub fn check(&mut self, cx: &mut VmContext) -> Answer<()> {
        self.share(cx).map(drop)
    }

    /// Shares it again after a restart of this program or of the guest. Returns whether it does so
    /// now.
    pub fn share_again(&mut self, cx: &mut VmContext) -> bool {
        if !cx.record.shares || self.shared.is_some() || !cx.guest.shares_allocator() {
            return false;
        }
        let shared = self.share(cx);
        if let Err(why) = &shared {
            tracing::debug!("{why}");
        }
        shared.is_ok()
    }

    /// Handles a guest that was reset or runs another kernel: what was hard-reclaimed or
    /// soft-reclaimed is memory like any other.
    pub fn on_reset(&mut self, cx: &VmContext) {
        (self.compaction, self.shrink) = (Compaction::default(), None);
        if let Some(shared) = self.shared.take() {
            shared.forget(&cx.pager);
        } else if cx.record.shares {
            cx.pager.residency().soften_all();
        }
    }

    /// Forgets the reserve: nothing is known of what a new kernel needs.
    pub fn forget_reserve(&mut self) {
        self.reserve.begin_again();
    }

    /// Forgets what the last change did: the allocator has no part in the new size.
    pub fn forget_last_change(&mut self) {
        self.last_change = SharedChange::default();
    }

    /// Brings everything back, hard-reclaimed memory included. Returns the bytes brought back.
    ///
    /// # Errors
    /// From the store or the system calls.
    pub fn give_back_all(&mut self, cx: &VmContext, zeros: Zeros) -> io::Result<u64> {
        let bytes = match &self.shared {
            Some(shared) => shared.give_back_all(&cx.pager, zeros)?,
            None => cx.pager.returner().give_back_all(zeros)?,
        };
        (self.shared, self.shrink) = (None, None);
        Ok(bytes)
    }

    /// Soft-reclaims free huge frames.
    ///
    /// # Errors
    /// Nothing may be reclaimed, or the guest does not share its allocator.
    pub fn take_soft(
        &mut self,
        cx: &mut VmContext,
        want_bytes: u64,
        keep_bytes: u64,
        work: &Work,
    ) -> Answer<(ReclaimReport, Option<End>)> {
        let began = Instant::now();
        let shared = self.share(cx)?;
        let (want, keep) = (want_bytes.div_ceil(HUGE_BYTES), keep_bytes.div_ceil(HUGE_BYTES));
        let (taken, stop, ended) = take(cx, &shared, How::Soft, want, keep, work);
        let stopped_by = match stop {
            Some(HyperAllocStop::Reset) if ended.is_none() && work.is_cancelled() => {
                CANCELLED.into()
            }
            Some(stop) => stop.to_string(),
            None if taken.huge_frames >= want => "the amount asked for was reached".into(),
            None => nothing_more(&taken, shared.counts().soft_bytes, keep),
        };
        let report = ReclaimReport {
            bytes: taken.reclaimed_bytes,
            blocks: taken.huge_frames - taken.already_empty,
            duration_ns: nanoseconds(began.elapsed()),
            scan_ns: nanoseconds(taken.scan),
            stopped_by,
            skipped: Skipped {
                in_use: taken.in_use,
                already_empty: taken.already_empty,
                cancelled: taken.busy,
            },
        };
        Ok((report, ended))
    }

    /// Soft-reclaims, under a limit, all that is free: it goes before anything in use, and needs no
    /// save.
    pub fn take_free(&mut self, cx: &mut VmContext) -> Option<End> {
        if !cx.guest.shares_allocator() {
            return None;
        }
        let shared = self.share(cx).ok()?;
        let (_, stop, ended) = take(cx, &shared, How::Soft, u64::MAX, 0, &Work::default());
        if let Some(stop) = stop {
            tracing::debug!("{stop}");
        }
        ended
    }

    /// Begins to change the guest's part of the initial memory to the size on record. What the
    /// guest lacks is returned at once.
    ///
    /// # Errors
    /// As [`SharedAllocator::take_soft`].
    pub fn begin_size(&mut self, cx: &mut VmContext) -> Answer<()> {
        let shared = self.share(cx)?;
        self.stopped = None;
        self.reserve.begin_again();
        let returned = shared.give(&cx.pager, Gap::of(cx, &shared).surplus());
        self.last_change =
            SharedChange { returned_bytes: returned * HUGE_BYTES, ..SharedChange::default() };
        self.shrink = Some(Shrink::default());
        Ok(())
    }

    /// Returns the time to the next step towards that size. `None`: there is no more to do for it,
    /// or QEMU may wait for room and so answers nobody.
    pub fn step_after(&self, cx: &VmContext) -> Option<Duration> {
        self.shrink.as_ref().filter(|_| !cx.waits()).map(Shrink::step_after)
    }

    /// Makes a step towards that size: hard-reclaims what the guest can spare, or has it free its
    /// caches.
    pub fn step(&mut self, cx: &mut VmContext) -> SizeStep {
        let shrink = self.shrink.take();
        if let Err(refused) = may_change(cx) {
            // A device came meanwhile, or a migration began. Once that is over, what is missing is
            // looked for again.
            return SizeStep { blocked_reason: Some(refused.to_string()), ended: None };
        }
        let (Some(shared), Some(mut shrink)) = (self.shared.clone(), shrink) else {
            return SizeStep { blocked_reason: None, ended: None };
        };
        let (blocked_reason, ended) =
            shrink.step(cx, &shared, &mut self.reserve, &mut self.last_change);
        self.last_change.purges = shrink.purges();
        if blocked_reason.is_none() {
            self.shrink = Some(shrink);
        }
        SizeStep { blocked_reason, ended }
    }

    /// Returns the allocator's part of the size.
    pub fn shared_size(&self) -> SharedSize {
        SharedSize {
            hard_bytes: self.shared.as_ref().map_or(0, |shared| shared.counts().hard_bytes),
            pause_left: self.reserve.pause_left(),
            is_moving: self.shrink.is_some(),
            last_change: self.last_change,
        }
    }

    /// Returns what is to be done for the size on record. First returns everything to a guest that
    /// is about to run out of memory.
    pub fn wants(&mut self, cx: &VmContext) -> Wants {
        let Some(shared) = self.shared.clone().filter(|_| cx.may_take().is_ok()) else {
            return Wants::Nothing;
        };
        self.checked = Some(Instant::now());
        self.reserve.relieve(cx, &shared);
        if may_change(cx).is_err() {
            return Wants::Nothing;
        }
        let gap = Gap::of(cx, &shared);
        match (gap.missing() > 0 && self.reserve.may_look(), gap.surplus() > 0) {
            (true, _) => Wants::Take,
            (false, true) => Wants::Give,
            (false, false) => Wants::Nothing,
        }
    }

    /// Whether it is time to ask [`SharedAllocator::wants`].
    pub fn is_due(&self) -> bool {
        self.checked.is_none_or(|checked| checked.elapsed() >= MISSING_EVERY)
    }

    /// Returns to the guest what it lacks of the size on record.
    pub fn give(&self, cx: &VmContext) {
        if let Some(shared) = &self.shared {
            shared.give(&cx.pager, Gap::of(cx, shared).surplus());
        }
    }

    /// Hard-reclaims what the guest has above the size on record, as far as it can spare that.
    pub fn take_missing(&mut self, cx: &mut VmContext) -> SizeStep {
        let Some(shared) = self.shared.clone() else {
            return SizeStep { blocked_reason: None, ended: None };
        };
        let gap = Gap::of(cx, &shared);
        let want = gap.missing().min(self.reserve.spare_huge(cx, &shared));
        if want < gap.missing().min(PIECE_HUGE) {
            return SizeStep { blocked_reason: Some(what_it_needs(cx, &shared, gap)), ended: None };
        }
        let (_, stop, ended) = take(cx, &shared, How::Hard, want, 0, &Work::default());
        let blocked_reason = || Gap::of(cx, &shared).blocked_reason(&shared);
        let reason = stop.map_or_else(blocked_reason, |stop| stop.to_string());
        SizeStep { blocked_reason: Some(reason), ended }
    }

    /// Handles a touch of memory that the guest must not use: stops the guest, if that is wanted.
    pub fn violated(&mut self, cx: &mut VmContext) {
        self.violation_reported.store(false, Release);
        cx.growth.look();
        if cx.record.on_violation != OnViolation::Stop || self.stopped.is_some() {
            return;
        }
        cx.qmp.reconnect();
        let why = match cx.command_guest("stop") {
            Ok(()) => "the guest touched memory that it must not use; QMP `cont` lets it go on",
            Err(_) => "the guest touched memory that it must not use; QEMU did not obey `stop`",
        };
        tracing::error!("stopped: {why}");
        self.stopped = Some(why.into());
    }

    /// Whether the guest is to be asked to compact its memory, once it is confirmed. `is_wanted`: it
    /// would serve automatic reclaim now.
    pub fn wants_compaction(&mut self, is_wanted: bool) -> bool {
        let Some(shared) = &self.shared else { return false };
        let now = Instant::now();
        if self.compaction.is_under_way() {
            if shared.has_purged() {
                self.compaction.end(now, shared.usage().movable);
            }
            return false;
        }
        is_wanted
            && self.compaction.is_due(now)
            && self.compaction.begin(now, shared.usage().movable)
    }

    /// Asks the guest to compact, if it is the one that runs: another kernel would find the request
    /// in its own memory.
    pub fn compact(&mut self, is_confirmed: bool) {
        match self.shared.as_ref().filter(|shared| is_confirmed && shared.is_there()) {
            Some(shared) => shared.ask_to_compact(),
            None => self.compaction.give_up(Instant::now()),
        }
    }

    /// Returns how free memory is found in a guest that shares its allocator, and why that way.
    /// `None`: the guest does not share it, as far as is known.
    pub fn mechanism(&self, cx: &VmContext) -> Option<(Mechanism, String)> {
        cx.guest.shares_allocator().then(|| match &self.refused {
            Some(why) => (Mechanism::None, why.clone()),
            None => (Mechanism::HyperAlloc, "its kernel shares its allocator".into()),
        })
    }

    /// How long installs took; `None`: the allocator is not shared.
    pub fn install_times(&self) -> Option<&Latency> {
        self.shared.as_deref().map(HyperAlloc::install_times)
    }

    /// Returns the status of the shared allocator.
    pub fn status(&self, cx: &VmContext) -> SharingStatus {
        let shared = self.shared.as_deref();
        let counts = shared.map(HyperAlloc::counts).unwrap_or_default();
        let percentile = |percent| shared?.install_times().percentile_ns(percent);
        SharingStatus {
            size_bytes: cx.record.size_bytes,
            hard_bytes: counts.hard_bytes,
            soft_bytes: counts.soft_bytes,
            installs: counts.installs,
            install_ns: FaultTimes { p50: percentile(50), p99: percentile(99) },
            violations: counts.violations,
            on_violation: cx.record.on_violation,
            stopped: self.stopped.clone(),
            fragmentation: shared.map(fragmentation),
        }
    }
}
