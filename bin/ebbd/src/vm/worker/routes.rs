//! What one controller finds out and another must act on. Controllers never call each other.

use std::time::{Duration, Instant};

use ebb_api::{HeatRequest, ReclaimReport};
use ebb_units::Gfn;
use ebb_vm::reach::Reach;

use super::Worker;
use crate::model::api_error::{Answer, failed};
use crate::model::host_pressure::PressureNotice;
use crate::model::member::Member;
use crate::support::open_files::OpenFiles;
use crate::vm::context::liveness::End;
use crate::vm::context::open_gate::OpenGate;
use crate::vm::devices::Narrowed;
use crate::vm::limit::{TURN, Turn};
use crate::vm::reclaim::Pass;
use crate::vm::reclaim::hyperalloc::{SizeStep, Wants};
use crate::vm::resize::SharedGoal;
use crate::vm::tiering::heat::Heat;

/// Most passes of one reclaim, where QEMU is too slow to answer in the middle of a pass.
const TRIES: u32 = 4;

impl Worker {
    /// Whether the guest is trusted and its kernel runs now. Inspects the guest if need be.
    pub(super) fn confirm(&mut self) -> bool {
        let runs = self.trust.look(&mut self.cx);
        if self.trust.has_lost_its_kernel(&self.cx) {
            self.lose_kernel();
        }
        let is_trusted = self.trust.settle(&mut self.cx, runs);
        if self.reclaim.hyperalloc.share_again(&mut self.cx) {
            // The size counts from the initial memory, which QEMU may not have reported yet.
            if self.cx.capabilities.is_none() {
                self.resize.glance(&mut self.cx);
            }
            self.settle_shared_size();
        }
        is_trusted
    }

    /// Confirms the guest for a command that would be refused if it is unknown.
    pub(super) fn confirm_if_unknown(&mut self) {
        if self.cx.guest.guest().is_err() {
            self.confirm();
        }
    }

    /// Acts on a reset if QEMU reported one.
    pub(super) fn notice_reset(&mut self) {
        if self.cx.qmp.hears_reset() {
            self.after_reset();
        }
    }

    /// Acts on a liveness check that found that the trusted kernel does not run any more.
    pub(super) fn route(&mut self, ended: Option<End>) {
        match ended {
            Some(End::Reset) => self.after_reset(),
            Some(End::Unknown) => {
                let why = "its vCPUs do not all run the kernel that is known";
                tracing::info!("{why}");
                self.trust.on_reset(&mut self.cx, why);
                self.lose_kernel();
                self.trust.tell_pager(&mut self.cx);
            }
            None => {}
        }
    }

    /// Drops all that was known of the guest: nothing of it is true after a reset.
    fn after_reset(&mut self) {
        self.trust.on_reset(&mut self.cx, "it was reset and is booting");
        self.lose_kernel();
        self.reclaim.hyperalloc.forget_reserve();
        self.resize.on_reset(&mut self.cx);
        self.trust.tell_pager(&mut self.cx);
    }

    /// Drops what was known of the kernel, because another one may run.
    fn lose_kernel(&mut self) {
        self.reclaim.on_reset(&self.cx);
        self.tiering.on_reset();
        self.trust.bring_back_for_next(&mut self.cx);
    }

    /// Starts a guest that waits before its first instruction until it is managed, or that was
    /// stopped until its memory is back.
    pub(super) fn begin(&mut self) {
        if !self.cx.record.begin || self.devices.must_stay_stopped(&self.cx) {
            return;
        }
        self.cx.qmp.reconnect();
        if !self.cx.qmp.is_connected() {
            return;
        }
        match self.cx.command_guest("cont") {
            Ok(()) => self.cx.record.note(|record| record.begin = false),
            Err(error) => tracing::error!("its guest does not go on: {error}"),
        }
    }

    pub(super) fn look_at_devices(&mut self) {
        let narrowed = self.devices.look(&mut self.cx);
        self.settle(narrowed);
    }

    pub(super) fn glance_at_devices(&mut self) {
        let narrowed = self.devices.glance(&mut self.cx);
        self.settle(narrowed);
    }

    pub(super) fn keep_devices(&mut self, open: &mut OpenFiles) {
        let narrowed = self.devices.keep(&mut self.cx, open);
        self.settle(narrowed);
    }

    /// Brings back the memory that newly found devices may ask for.
    fn settle(&mut self, narrowed: Option<Narrowed>) {
        let Some(narrowed) = narrowed else { return };
        let back = match narrowed.reach {
            Reach::Nothing => self.reclaim.give_back_all(&self.cx),
            _ => self.cx.pager.returner().give_back_in_use(),
        };
        let is_back = back.is_ok();
        self.devices.settle(&narrowed, back);
        if is_back {
            self.begin();
        }
    }

    /// Reclaims free memory.
    pub(super) fn take(&mut self, want_bytes: u64, keep_bytes: u64) -> Answer<ReclaimReport> {
        let began = Instant::now();
        self.keep_devices(&mut OpenFiles::default());
        self.cx.may_take()?;
        let is_trusted = self.confirm();
        self.reclaim.may_reclaim(&self.cx, is_trusted)?;
        if self.cx.guest.shares_allocator() {
            let (report, ended) =
                self.reclaim.hyperalloc.take_soft(&mut self.cx, want_bytes, keep_bytes)?;
            self.route(ended);
            return Ok(report);
        }
        let pass = self.passes(want_bytes, keep_bytes)?;
        Ok(pass.report(want_bytes, began.elapsed()))
    }

    /// Makes passes over free memory. Repeats a pass in which QEMU did not answer in time.
    fn passes(&mut self, want_bytes: u64, keep_bytes: u64) -> Answer<Pass> {
        let mut all = Pass::default();
        for _ in 0..TRIES {
            let left = want_bytes - all.bytes();
            let (pass, ended) = self.reclaim.pass(&mut self.cx, left, keep_bytes);
            self.route(ended);
            let is_cut_short = pass.is_cut_short();
            all = all.and_then(pass);
            // Outside of a pass nobody waits for what the pass locks, so QEMU has time to answer.
            if !is_cut_short || !self.confirm() {
                break;
            }
            self.keep_devices(&mut OpenFiles::default());
            self.cx.may_take()?;
        }
        Ok(all)
    }

    /// Reclaims automatically, if that is on and due.
    pub(super) fn keep_reclaiming(&mut self) {
        if self.reclaim.is_due(&self.cx) {
            self.take_by_itself(None);
        }
    }

    /// Notes what `ebbd` says of the host, and reclaims if the host is short of memory. Returns the
    /// reclaimed bytes.
    pub(super) fn hear_of_host(&mut self, notice: PressureNotice) -> u64 {
        // While the guest waits for room, QEMU may answer nobody.
        match self.reclaim.hear(&self.cx, notice).filter(|_| !self.cx.waits()) {
            Some(why) => self.take_by_itself(Some(why)),
            None => 0,
        }
    }

    /// Makes one round of automatic reclaim. `why`: host pressure begins it, with the figures.
    /// Returns the reclaimed bytes.
    fn take_by_itself(&mut self, why: Option<String>) -> u64 {
        match self.take(u64::MAX, self.cx.record.auto.keep_bytes) {
            Ok(report) => {
                let bytes = report.bytes;
                self.reclaim.note_auto(report, why);
                bytes
            }
            Err(error) => {
                tracing::debug!("{error}");
                0
            }
        }
    }

    /// Has the guest compact its memory if automatic reclaim would gain by it.
    pub(super) fn keep_compact(&mut self) {
        if self.reclaim.wants_compaction(&self.cx) {
            let is_confirmed = self.confirm();
            self.reclaim.hyperalloc.compact(is_confirmed);
        }
    }

    /// Begins to keep the limit on record, or stops keeping it.
    pub(super) fn apply_limit(&mut self) {
        self.limit.apply(&mut self.cx);
        if self.cx.marks().is_some() {
            self.keep_limit(&mut OpenFiles::default());
        }
    }

    /// Evicts for one turn, if the marks of the limit require it.
    pub(super) fn keep_limit(&mut self, open: &mut OpenFiles) {
        self.glance_at_devices();
        let Turn::Go(marks) = self.limit.begin_turn(&mut self.cx, open) else { return };
        let (end, mut more) = (Instant::now() + TURN, true);
        while more && Instant::now() < end && self.cx.reaching.is_unchanged() {
            if let Some(is_pressed) = self.limit.asks_guest(&self.cx, marks) {
                self.ask_guest(is_pressed);
            }
            let heat = self.tiering.recent_heat();
            let heat_of = |gfn: Gfn| heat.map_or(0, |heat| heat.of(gfn));
            let (goes_on, ended) = self.limit.step(&mut self.cx, marks, &heat_of, end);
            self.route(ended);
            more = goes_on;
        }
        self.limit.end_turn(&self.cx, marks, more);
    }

    /// Confirms that the guest's kernel is the one that runs, so that its word counts. Under
    /// pressure it also reclaims what that kernel says is free.
    fn ask_guest(&mut self, is_pressed: bool) {
        // QEMU may wait for the vCPU whose fault waits for room.
        let _gate = OpenGate::for_faults(&self.cx.pager);
        if self.cx.guest.guest().is_ok() || self.cx.guest.is_due() {
            self.confirm();
        }
        if is_pressed {
            let ended = self.reclaim.hyperalloc.take_free(&mut self.cx);
            self.route(ended);
        }
    }

    /// Makes a step towards the size on record, if one is due.
    pub(super) fn keep_size(&mut self) {
        let shared = self.reclaim.hyperalloc.shared_size();
        if self.resize.is_due(&self.cx, &shared) {
            self.pursue_size();
        }
    }

    /// Makes a step towards the size on record.
    pub(super) fn pursue_size(&mut self) {
        let shared = self.reclaim.hyperalloc.shared_size();
        let goal = self.resize.pursue(&mut self.cx, &shared);
        if let Err(error) = self.pursue_shared(goal) {
            tracing::debug!("its size: {error}");
            self.resize.note_failure(&error);
        }
    }

    /// Has the shared allocator make for its part of the size, if that part changed.
    pub(super) fn pursue_shared(&mut self, goal: SharedGoal) -> Answer<()> {
        if goal == SharedGoal::New {
            self.reclaim.hyperalloc.begin_size(&mut self.cx)?;
            self.resize.forget_blocked_reason();
            // Goes as far as it can without waiting for the guest.
            while self.reclaim.hyperalloc.step_after(&self.cx) == Some(Duration::ZERO) {
                self.step_shared_size();
            }
        }
        Ok(())
    }

    pub(super) fn step_shared_size(&mut self) {
        let step = self.reclaim.hyperalloc.step(&mut self.cx);
        self.note_step(step);
    }

    fn note_step(&mut self, SizeStep { blocked_reason, ended }: SizeStep) {
        if let Some(reason) = blocked_reason {
            self.resize.note_blocked_reason(reason);
        }
        self.route(ended);
    }

    /// Keeps the shared allocator at its part of the size on record; checks that now and then.
    pub(super) fn keep_shared_size(&mut self) {
        let allocator = &self.reclaim.hyperalloc;
        if allocator.step_after(&self.cx).is_none() && allocator.is_due() {
            self.settle_shared_size();
        }
    }

    fn settle_shared_size(&mut self) {
        match self.reclaim.hyperalloc.wants(&self.cx) {
            Wants::Nothing => {}
            Wants::Give => self.reclaim.hyperalloc.give(&self.cx),
            Wants::Take if self.confirm() => {
                let step = self.reclaim.hyperalloc.take_missing(&mut self.cx);
                self.note_step(step);
            }
            Wants::Take => {}
        }
    }

    /// Does what is due of a monitoring.
    pub(super) fn keep_heat(&mut self) {
        if !self.tiering.may_be_due(&self.cx) {
            return;
        }
        let is_trusted = self.cx.guest.guest().is_ok() && self.confirm();
        let Worker { tiering, limit, cx, .. } = self;
        let evicted = limit.evicted();
        let mut before_forgetting = |cx: &_| limit.note_mapped(cx);
        let ended = tiering.monitor(cx, is_trusted, &mut before_forgetting, evicted);
        self.route(ended);
    }

    /// Returns what the pool wants to know of this VM; `None` if it is not in the pool.
    pub(super) fn member(&mut self) -> Answer<Option<Member>> {
        let Some(share) = self.cx.record.share else { return Ok(None) };
        let held_bytes = self.cx.pager.residency().taken_bytes().map_err(failed("the VM's RAM"))?;
        let heat = self.tiering.recent_heat();
        let is_by_guest = heat.is_some_and(Heat::is_by_guest);
        let monitored = heat.map(Heat::began);
        let (demand_bytes, is_monitoring_wanted) =
            self.limit.demand(&self.cx, held_bytes, monitored);
        let member = Member {
            share,
            held_bytes,
            limit_bytes: self.cx.record.limit_bytes,
            hot_bytes: heat.map(Heat::reused_bytes),
            unseen_bytes: self.limit.kernel_bytes().filter(|_| is_by_guest).unwrap_or(0),
            demand_bytes,
            memory_bytes: self.cx.memory_bytes(),
        };
        if is_monitoring_wanted {
            // Where nothing can be monitored, the demand alone counts.
            let _ = self.tiering.ask(&self.cx, HeatRequest { fresh: true });
        }
        Ok(Some(member))
    }
}
