//! A VM's size: what the two controllers that change it do together.

use std::time::Duration;

use ebb_api::{OnViolation, ResizeReport, ResizeRequest};
use ebb_policy::resize::SizeTarget;

use crate::model::api_error::Answer;
use crate::vm::context::VmContext;
use crate::vm::context::liveness::End;
use crate::vm::hyperalloc::{SharedAllocator, SizeStep};
use crate::vm::resize::{Resize, SharedGoal};

/// The controllers of a VM's size, lent by the worker.
pub(super) struct Size<'a> {
    pub(super) cx: &'a mut VmContext,
    pub(super) resize: &'a mut Resize,
    pub(super) hyperalloc: &'a mut SharedAllocator,
    /// Why the guest's kernel does not run any more, if that was seen. The worker acts on it.
    pub(super) ended: Option<End>,
}

impl Size<'_> {
    /// Begins to bring the VM to another size. The guest was confirmed before, if that was possible.
    pub(super) fn begin(&mut self, request: ResizeRequest, target: SizeTarget) -> Answer<()> {
        let shared = self.hyperalloc.shared_size();
        let prepared = self.resize.prepare(self.cx, target, &shared)?;
        if prepared.is_by_sharing() {
            self.hyperalloc.check(self.cx)?;
        }
        // The size is not the pilot's from now on, and counts from what it was before the pilot.
        self.resize.plug_again(self.cx)?;
        let goal = self.resize.begin(self.cx, request, &prepared)?;
        if goal == SharedGoal::Same {
            self.hyperalloc.forget_last_change();
        }
        self.pursue_shared(goal)?;
        if self.ended.is_none() {
            self.pursue();
        }
        Ok(())
    }

    /// Makes the present size the one that stays.
    pub(super) fn stay(&mut self, on_violation: Option<OnViolation>) -> Answer<ResizeReport> {
        let shared = self.hyperalloc.shared_size();
        let stayed = self.resize.stay(self.cx, on_violation, &shared);
        // The shared allocator's part may be on record although QEMU refused the rest.
        let goal = self.resize.take_goal();
        let pursued = self.pursue_shared(goal);
        stayed.and_then(|report| pursued.map(|()| report))
    }

    /// Makes a step towards the size on record, if one is due.
    pub(super) fn keep(&mut self) {
        if self.resize.is_due(self.cx, &self.hyperalloc.shared_size()) {
            self.pursue();
        }
    }

    fn pursue(&mut self) {
        let goal = self.resize.pursue(self.cx, &self.hyperalloc.shared_size());
        if let Err(error) = self.pursue_shared(goal) {
            tracing::debug!("its size: {error}");
            self.resize.note_failure(&error);
        }
    }

    /// Has the shared allocator make for its part of the size, if that part changed.
    fn pursue_shared(&mut self, goal: SharedGoal) -> Answer<()> {
        if goal == SharedGoal::New {
            self.hyperalloc.begin_size(self.cx)?;
            self.resize.forget_blocked_reason();
            // Goes as far as it can without waiting for the guest.
            let is_next = |size: &Self| size.hyperalloc.step_after(size.cx) == Some(Duration::ZERO);
            while self.ended.is_none() && is_next(self) {
                self.step_shared();
            }
        }
        Ok(())
    }

    /// Has the shared allocator make a step towards its part of the size.
    pub(super) fn step_shared(&mut self) {
        let step = self.hyperalloc.step(self.cx);
        self.note(step);
    }

    /// Has the shared allocator take what the guest has above its part of the size.
    pub(super) fn take_missing(&mut self) {
        let step = self.hyperalloc.take_missing(self.cx);
        self.note(step);
    }

    fn note(&mut self, SizeStep { blocked_reason, ended }: SizeStep) {
        if let Some(reason) = blocked_reason {
            self.resize.note_blocked_reason(reason);
        }
        self.ended = ended;
    }

    /// Reports how far the VM is on its way to its target.
    pub(super) fn report(&self) -> Answer<ResizeReport> {
        self.resize.report(self.cx, &self.hyperalloc.shared_size())
    }
}
