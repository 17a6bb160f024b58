//! How the worker takes memory: what is free in the guest, and what is above the limit.

use std::time::Instant;

use ebb_api::{EvictReport, ReclaimReport};
use ebb_units::Gfn;

use super::Worker;
use crate::model::api_error::Answer;
use crate::model::host_pressure::PressureNotice;
use crate::model::work::CANCELLED;
use crate::support::failpoint;
use crate::support::open_files::OpenFiles;
use crate::vm::context::mailbox::Which;
use crate::vm::context::work::Work;
use crate::vm::limit::force::{self, ByForce};
use crate::vm::limit::{self, TURN, Turn};
use crate::vm::reclaim::Pass;

/// Most passes of one reclaim, where QEMU is too slow to answer in the middle of a pass.
const TRIES: u32 = 4;

impl Worker {
    /// Reclaims free memory.
    pub(super) fn take(
        &mut self,
        want_bytes: u64,
        keep_bytes: u64,
        which: Which,
        work: &Work,
    ) -> Answer<ReclaimReport> {
        let began = Instant::now();
        self.keep_devices(&mut OpenFiles::default());
        self.cx.may_take()?;
        let is_trusted = self.confirm();
        self.reclaim.may_reclaim(&self.cx, is_trusted)?;
        if self.cx.guest.shares_allocator() {
            let (report, ended) =
                self.hyperalloc.take_soft(&mut self.cx, want_bytes, keep_bytes, work)?;
            self.route(ended);
            self.reclaim.note_time(&report);
            return Ok(report);
        }
        let pass = self.passes(want_bytes, keep_bytes, which, work)?;
        let report = pass.report(want_bytes, began.elapsed());
        self.reclaim.note_time(&report);
        Ok(report)
    }

    /// Makes passes over free memory. Repeats a pass in which QEMU did not answer in time.
    fn passes(
        &mut self,
        want_bytes: u64,
        keep_bytes: u64,
        which: Which,
        work: &Work,
    ) -> Answer<Pass> {
        let mut all = Pass::default();
        for _ in 0..TRIES {
            let left = want_bytes - all.bytes();
            let (pass, ended) = self.reclaim.pass(&mut self.cx, left, keep_bytes, which, work);
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
        match self.take(u64::MAX, self.cx.record.auto.keep_bytes, Which::Lasting, &Work::default())
        {
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
        if self.hyperalloc.wants_compaction(self.reclaim.wants_more(&self.cx)) {
            let is_confirmed = self.confirm();
            self.hyperalloc.compact(is_confirmed);
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
    /// pressure it also reclaims what that kernel says is free. An unknown kernel is looked for only
    /// below the high mark: that takes long, and faults wait meanwhile. A tick looks in any case.
    fn ask_guest(&mut self, is_pressed: bool) {
        let may_search = || !limit::is_above(&self.cx, |marks| marks.high_bytes);
        let is_due = self.cx.guest.is_due(&self.cx.pager);
        if (self.cx.guest.kernel().is_ok() && !is_due) || (is_due && may_search()) {
            self.confirm();
        }
        if is_pressed {
            let ended = self.hyperalloc.take_free(&mut self.cx);
            self.route(ended);
        }
    }

    /// Evicts frames, used or not.
    pub(super) fn evict(&mut self, want_bytes: u64, work: &Work) -> Answer<EvictReport> {
        let began = Instant::now();
        self.look_at_devices();
        limit::may_evict(&self.cx)?;
        // Also makes the guest's metadata known right after a restart.
        self.confirm();
        let pinned = force::prepare(&mut self.cx)?;
        let mut by_force = ByForce::new(&self.cx, want_bytes, pinned.is_some());
        let blocked = loop {
            work.note(by_force.saved_bytes(), Some(want_bytes));
            failpoint::may_wait(self.cx.name(), || work.is_cancelled());
            if work.is_cancelled() {
                break Some(CANCELLED.into());
            }
            if !self.cx.reaching.is_unchanged() {
                self.look_at_devices();
                if let Err(why) = limit::may_evict(&self.cx) {
                    break Some(why.to_string());
                }
            }
            let (goes_on, ended) = by_force.step(&mut self.cx);
            self.route(ended);
            if !goes_on? {
                break None;
            }
        };
        Ok(by_force.report(began, blocked, pinned.as_deref()))
    }
}
