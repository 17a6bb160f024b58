//! A VM's size, by whatever can change it. The part of a shared allocator is in `vm::hyperalloc`.

mod balloon;
mod blocked;
mod parts;
pub mod plugged;
mod progress;
mod report;
mod reported;
mod target;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use ebb_api::{OnViolation, ResizeReport, ResizeRequest, SizeMechanism, SizeState};
use ebb_policy::resize::{Mechanism, Plan, SizeParts, SizeTarget};
use ebb_units::HUGE_BYTES;

use self::balloon::BalloonControl;
use self::parts::{is_about_the_guest, piece_bytes, plan, shared_bytes, size_parts};
use self::progress::Progress;
use self::reported::{Reported, figures, now_s};
use self::target::{no_more, target};
use super::context::VmContext;
use super::context::capabilities::Capabilities;
use super::context::shared_size::SharedSize;
use crate::model::api_error::{Answer, ApiError, failed, not_allowed};
use crate::model::record::SizeRecord;

pub use self::target::target_of;

/// Time between two looks at a size that does not move, and at the guest's need.
const STEP_EVERY: Duration = Duration::from_secs(1);
/// Least time between two looks for a status. A look is a dozen questions to QEMU's main thread, and
/// whoever may only read may ask for a status as often as it likes.
const STATUS_EVERY: Duration = Duration::from_millis(50);
/// Seconds between two figures of the guest while its size is to change.
const POLL_BUSY_S: u64 = 1;
/// Seconds between two figures of the guest while its size stays.
const POLL_IDLE_S: u64 = 5;

/// The controller of one VM's size.
#[derive(Default)]
pub struct Resize {
    /// When the last step was made.
    stepped: Option<Instant>,
    /// When QEMU was last asked for the guest's figures.
    looked: Option<Instant>,
    /// When it was last asked for a status.
    asked: Option<Instant>,
    /// Whether they were asked for because of the pilot.
    is_watched: bool,
    /// Whether this process knows that the devices are as the pilot has asked, by the record.
    is_compared: bool,
    progress: Option<Progress>,
    balloon: BalloonControl,
    /// What the shared allocator has not been asked for yet, even if a later request failed.
    goal: SharedGoal,
}

/// A size that this VM can have, before anything is done for it.
pub struct Prepared {
    plan: Plan,
    parts: SizeParts,
    target: SizeTarget,
}

impl Prepared {
    /// Whether the shared allocator is to bring the VM to that size.
    pub fn is_by_sharing(&self) -> bool {
        self.plan.mechanism == Mechanism::HyperAlloc
    }
}

/// Whether the shared allocator is to make for another part of the size than before.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[must_use]
pub enum SharedGoal {
    /// The part is as before.
    #[default]
    Same,
    /// The part is another one, and on record.
    New,
}

impl Resize {
    /// Asks the VMM by what the size can change.
    ///
    /// # Errors
    /// The VMM does not tell.
    pub fn look(&mut self, cx: &mut VmContext) -> Answer<()> {
        let is_watched = cx.record.size.is_some() || is_watched(cx);
        cx.qmp.reconnect();
        let qmp = cx.qmp.socket();
        let qmp = qmp.ok_or_else(|| not_allowed("QEMU's QMP socket does not answer"))?;
        let found = Capabilities::ask(qmp, &cx.growth).map_err(not_allowed)?;
        let wanted_s = if is_watched { POLL_BUSY_S } else { POLL_IDLE_S };
        self.looked = Some(Instant::now());
        self.balloon.poll(qmp, &found, wanted_s).map_err(not_allowed)?;
        cx.capabilities = Some(found);
        self.notice_others(cx);
        Ok(())
    }

    /// Does as [`Resize::look`], for a caller that does not depend on it.
    pub fn glance(&mut self, cx: &mut VmContext) {
        if let Err(error) = self.look(cx) {
            tracing::debug!("its size: {error}");
        }
    }

    /// Does as [`Resize::glance`] for a status, unless it has just been done.
    pub fn glance_for_status(&mut self, cx: &mut VmContext) {
        let is_due = self.asked.is_none_or(|asked| asked.elapsed() >= STATUS_EVERY);
        if is_due || cx.capabilities.is_none() {
            self.asked = Some(Instant::now());
            self.glance(cx);
        }
    }

    /// Has the figures of a guest at hand for which the pilot decides: it relieves a guest that is
    /// short of memory, and has guests unplug what they can spare.
    pub fn keep_figures(&mut self, cx: &mut VmContext) {
        let was_watched = std::mem::replace(&mut self.is_watched, is_watched(cx));
        let has_balloon = cx.capabilities.as_ref().is_none_or(|found| found.balloon.is_some());
        let is_due = self.looked.is_none_or(|looked| looked.elapsed() >= STEP_EVERY);
        // Once more after the pilot: the guest need not tell its figures that often any more.
        let is_wanted = if self.is_watched { is_due } else { was_watched };
        let is_of_use = has_balloon || !cx.record.piloted_devices.is_empty();
        if is_wanted && is_of_use && cx.record.size.is_none() && !cx.waits() {
            // A QEMU that does not answer is not asked at every tick.
            self.looked = Some(Instant::now());
            self.glance(cx);
            self.plug_for_pressed(cx);
        }
    }

    /// Finds out how the VM can be brought to another size. The guest was confirmed before, if that
    /// was possible.
    ///
    /// # Errors
    /// The VM cannot have that size.
    pub fn prepare(
        &self,
        cx: &VmContext,
        target: SizeTarget,
        shared: &SharedSize,
    ) -> Answer<Prepared> {
        cx.may_take()?;
        let parts = size_parts(cx, shared);
        let plan = plan(&parts, &target);
        let plan = plan.and_then(|plan| plan.check_drivers(&parts).map(|()| plan));
        let plan = plan.map_err(|refusal| match cx.guest.guest() {
            Err(why) if is_about_the_guest(&refusal) => {
                ApiError::NotTrusted(format!("{refusal}; the guest is not trusted: {why}"))
            }
            _ => not_allowed(refusal),
        })?;
        Ok(Prepared { plan, parts, target })
    }

    /// Begins to bring the VM to that size.
    ///
    /// # Errors
    /// The record cannot be written; then nothing has changed.
    pub fn begin(
        &mut self,
        cx: &mut VmContext,
        request: ResizeRequest,
        prepared: &Prepared,
    ) -> Answer<SharedGoal> {
        let Prepared { plan, parts, target } = prepared;
        let resident = cx.pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
        let shared_bytes = shared_bytes(cx, parts, plan);
        // In one change: if it cannot be written, nothing is done for the size.
        cx.record.change(|record| {
            record.on_violation = request.on_violation.unwrap_or(record.on_violation);
            record.size =
                Some(SizeRecord { bytes: target.bytes, node: request.node, by: request.by });
            if prepared.is_by_sharing() {
                record.size_bytes = shared_bytes;
            }
        })?;
        self.progress = Some(Progress::new(plan, parts.size_of(target), resident, now_s()));
        Ok(if prepared.is_by_sharing() { SharedGoal::New } else { SharedGoal::Same })
    }

    /// Makes the present size the one that stays. [`Resize::take_goal`] then returns what the
    /// shared allocator is to make for.
    ///
    /// # Errors
    /// QEMU does not obey, or the record cannot be written.
    pub fn stay(
        &mut self,
        cx: &mut VmContext,
        on_violation: Option<OnViolation>,
        shared: &SharedSize,
    ) -> Answer<ResizeReport> {
        let parts = size_parts(cx, shared);
        let now = Plan {
            mechanism: Mechanism::VirtioMem,
            reason: "it stays as it is".into(),
            requested_bytes: parts.devices.iter().map(|device| device.plugged_bytes).collect(),
            ballooned_bytes: parts.ballooned_bytes(),
            hard_bytes: parts.hard_bytes.unwrap_or(0),
        };
        self.apply(cx, &parts, &now).map_err(not_allowed)?;
        let stopped_by = no_more(cx.record.size);
        cx.record.change(|record| {
            record.on_violation = on_violation.unwrap_or(record.on_violation);
            record.size = None;
            // It is not the pilot's any more.
            record.piloted_devices.clear();
        })?;
        let size = parts.size_bytes();
        self.progress = None;
        Ok(ResizeReport {
            bytes: size,
            wanted_bytes: size,
            node: None,
            mechanism: SizeMechanism::VirtioMem,
            reason: now.reason,
            state: SizeState::Off,
            least_bytes: None,
            taken_bytes: 0,
            emptied_bytes: 0,
            returned_bytes: 0,
            purges: 0,
            duration_ns: 0,
            stopped_by,
        })
    }

    /// Returns what the shared allocator has not been asked for yet, and counts it as asked for.
    pub fn take_goal(&mut self) -> SharedGoal {
        std::mem::take(&mut self.goal)
    }

    /// Whether a step towards the size on record is due.
    pub fn is_due(&self, cx: &VmContext, shared: &SharedSize) -> bool {
        if cx.record.size.is_none() || cx.waits() {
            return false;
        }
        let since = self.stepped.is_none_or(|stepped| stepped.elapsed() >= STEP_EVERY);
        since || self.state(cx, shared) == SizeState::Moving
    }

    /// Makes a step towards the size on record.
    pub fn pursue(&mut self, cx: &mut VmContext, shared: &SharedSize) -> SharedGoal {
        self.stepped = Some(Instant::now());
        if let Err(error) = self.take_step(cx, shared) {
            tracing::debug!("its size: {error}");
            self.note_failure(&error);
        }
        self.take_goal()
    }

    /// Notes why a step could not be made.
    pub fn note_failure(&mut self, error: &ApiError) {
        if let Some(progress) = &mut self.progress {
            progress.failure = Some(error.to_string());
        }
    }

    fn take_step(&mut self, cx: &mut VmContext, shared: &SharedSize) -> Answer<()> {
        let Some(target) = target(cx) else { return Ok(()) };
        cx.may_take()?;
        self.look(cx)?;
        let parts = size_parts(cx, shared);
        self.begin_progress(cx, &parts, &target)?;
        let pressed = self.balloon.is_pressed(cx, &parts);
        let figures = figures(cx, self.progress.as_ref());
        let Some(progress) = &mut self.progress else { return Ok(()) };
        progress.note_size(parts.size_of(&target), target.bytes, now_s());
        if pressed && parts.ballooned_bytes() > 0 && progress.pause_left().is_none() {
            progress.pause();
            self.balloon.count_release();
        }
        let bytes = match figures {
            // The driver unplugs what the guest can do without, and nothing else.
            Reported::Nobody if progress.mechanism == Mechanism::VirtioMem => target.bytes,
            Reported::Nobody | Reported::NotYet => {
                progress.step(target.bytes, None, piece_bytes(&parts))
            }
            Reported::Figures(figures) => {
                progress.step(target.bytes, Some(figures), piece_bytes(&parts))
            }
        };
        let bytes = if progress.mechanism == Mechanism::HyperAlloc { target.bytes } else { bytes };
        let is_paused = progress.pause_left().is_some();
        let mut plan = plan(&parts, &SizeTarget { bytes, ..target }).map_err(not_allowed)?;
        if is_paused {
            plan.ballooned_bytes = 0;
        }
        if pressed || is_paused {
            let devices = plan.requested_bytes.iter_mut().zip(&parts.devices);
            devices.for_each(|(bytes, device)| *bytes = (*bytes).max(device.plugged_bytes));
        }
        let applied = self.apply(cx, &parts, &plan);
        if let Some(progress) = &mut self.progress {
            progress.failure = applied.as_ref().err().map(ToString::to_string);
        }
        applied.map_err(not_allowed)
    }

    /// Begins the progress, if the process before this one was on its way to the size.
    fn begin_progress(
        &mut self,
        cx: &VmContext,
        parts: &SizeParts,
        target: &SizeTarget,
    ) -> Answer<()> {
        if self.progress.is_none() {
            let plan = plan(parts, target).map_err(not_allowed)?;
            let resident = cx.pager.ram().resident_bytes();
            let resident = resident.map_err(failed("the VM's RAM"))?;
            self.progress = Some(Progress::new(&plan, parts.size_of(target), resident, now_s()));
        }
        Ok(())
    }

    /// Tells the record and the devices the parts of the plan that are new.
    fn apply(&mut self, cx: &mut VmContext, parts: &SizeParts, plan: &Plan) -> Result<(), String> {
        let hard_bytes = plan.hard_bytes.next_multiple_of(HUGE_BYTES);
        if parts.hard_bytes.is_some() && cx.wanted_hard() * HUGE_BYTES != hard_bytes {
            let shared_bytes = shared_bytes(cx, parts, plan);
            let noted = cx.record.change(|record| record.size_bytes = shared_bytes);
            noted.map_err(|error| error.to_string())?;
            self.goal = SharedGoal::New;
        }
        let VmContext { capabilities, qmp, .. } = cx;
        let (Some(found), Some(qmp)) = (capabilities, qmp.socket()) else { return Ok(()) };
        let devices = found.pluggers.iter_mut().zip(&parts.devices).zip(&plan.requested_bytes);
        for ((plugger, device), &bytes) in devices {
            if device.requested_bytes != bytes {
                plugger.request(qmp, bytes)?;
            }
        }
        let requested = self.balloon.request(qmp, parts, plan.ballooned_bytes);
        requested.map_err(|error| error.to_string())
    }

    /// Notes why the shared allocator has not all of its part, or that it has.
    pub fn note_blocked_reason(&mut self, reason: String) {
        if let Some(progress) = &mut self.progress {
            progress.blocked_reason = Some(reason);
        }
    }

    /// Forgets that note: the shared allocator begins anew.
    pub fn forget_blocked_reason(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.blocked_reason = None;
        }
    }

    /// Handles a reset of the guest. The balloon must not be in the new kernel's way; it is filled
    /// again once that kernel tells what it needs.
    pub fn on_reset(&mut self, cx: &mut VmContext) {
        if let Some(progress) = &mut self.progress {
            progress.begin_again(now_s());
        }
        self.balloon.empty(cx);
    }

    /// Prepares a detach: nothing is left in the balloon, and nobody asks it for figures.
    pub fn give_balloon_back(&mut self, cx: &mut VmContext) {
        self.balloon.give_back(cx);
    }
}

/// Whether the pilot decides by what the guest tells.
fn is_watched(cx: &VmContext) -> bool {
    cx.record.is_piloted && cx.record.limit_bytes.is_some() || plugged::is_watched(cx)
}
