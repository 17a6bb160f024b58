//! What the worker does with a command.

use std::time::Instant;

use ebb_api::{
    DetachReport, EvictReport, LimitRequest, LimitStatus, Mode, ResizeReport, ResizeRequest,
};
use ebb_units::FRAME_BYTES;

use super::{Next, Outcome, Worker, detach, limit, share, status};
use crate::model::api_error::{Answer, ApiError, failed, not_allowed};
use crate::model::host_pressure::PressureNotice;
use crate::model::share::Share;
use crate::support::nanoseconds::nanoseconds;
use crate::support::open_files::OpenFiles;
use crate::vm::context::LEAVING;
use crate::vm::context::mailbox::Command;
use crate::vm::limit::force::ByForce;
use crate::vm::limit::in_flight::{may_tell_in_flight, nothing_more};
use crate::vm::resize::{self, SharedGoal};

impl Worker {
    /// Carries out a command, unless nobody waits for its answer any more.
    pub(super) fn obey(&mut self, command: Command) -> Next {
        if command.is_moot() {
            return Next::Go;
        }
        self.cx.mailbox.note_begin();
        let asks_qemu = match command {
            Command::Status(..) | Command::Pressure | Command::Ready(_) => false,
            Command::HostPressure(PressureNotice { why: None, .. }, _) => false,
            Command::Resize(..) | Command::Size(_) | Command::HostPressure(..) => !self.cx.waits(),
            _ => true,
        };
        if asks_qemu {
            // The command may need QEMU, and QEMU may wait for room: no touch waits until the next
            // look at the limit.
            self.cx.pager.room().halt_above(u64::MAX);
        }
        self.devices.glance_at_regions(&mut self.cx);
        self.notice_reset();
        self.glance_at_devices();
        self.carry_out(command)
    }

    fn carry_out(&mut self, command: Command) -> Next {
        match command {
            Command::Status(counts, to) => drop(to.send(self.status(counts))),
            Command::Ready(to) => drop(to.send(Ok(()))),
            Command::Reclaim(request, to) => {
                let keep_bytes = self.cx.record.auto.keep_bytes;
                drop(to.send(self.take(request.bytes.unwrap_or(u64::MAX), keep_bytes)));
            }
            Command::Auto(request, to) => {
                if request.on {
                    // So that the answer can tell what is in the way.
                    self.confirm_if_unknown();
                }
                let answer = self.reclaim.set_auto(&mut self.cx, request);
                // `ebbd` learns by it whether to watch the host for this VM.
                self.publish();
                drop(to.send(answer));
            }
            Command::Limit(request, to) => drop(to.send(self.set_limit(request))),
            Command::Pressure => self.keep_limit(&mut OpenFiles::default()),
            Command::Resize(request, to) => drop(to.send(self.begin_resize(request))),
            Command::Size(to) => {
                self.keep_size();
                drop(to.send(self.size_report()));
            }
            Command::Violation => self.reclaim.hyperalloc.violated(&mut self.cx),
            Command::Evict(request, to) => drop(to.send(self.evict(request.bytes))),
            Command::Monitor(request, to) => {
                let asked = self.tiering.ask(&self.cx, request);
                if let Ok(true) = asked {
                    self.keep_heat();
                }
                drop(to.send(asked.map(|_| self.tiering.report())));
            }
            Command::Heat(to) => drop(to.send(Ok(self.tiering.report()))),
            Command::Share(share, to) => {
                let answer = self.set_share(share);
                self.publish();
                drop(to.send(answer));
            }
            Command::Allow(limit_bytes, to) => {
                if share::allow(&mut self.cx, limit_bytes) {
                    self.apply_limit();
                }
                self.publish();
                drop(to.send(Ok(())));
            }
            Command::HostPressure(notice, to) => drop(to.send(Ok(self.hear_of_host(notice)))),
            Command::Detach(to) => match self.detach() {
                Ok(report) => return Next::End(Outcome::Ended(Some((to, report)))),
                Err(refused) => drop(to.send(Err(refused))),
            },
            Command::FaultsEnded(why) => return self.faults_ended(why),
            Command::Panicked(why) => return Next::End(Outcome::Panicked(why)),
        }
        Next::Go
    }

    fn status(&mut self, counts: bool) -> Answer<ebb_api::VmStatus> {
        if !self.cx.waits() {
            self.confirm_if_unknown();
            self.resize.glance(&mut self.cx);
        }
        self.reclaim.judge_restored(&self.cx);
        status::of(&self.knowing(), counts)
    }

    fn set_limit(&mut self, request: LimitRequest) -> Answer<LimitStatus> {
        request.check()?;
        if self.cx.record.share.is_some() {
            return Err(not_allowed(format!(
                "the pool sets its limit: take it out of the pool first, with ebb share {} off",
                self.cx.name()
            )));
        }
        if request.bytes.is_some() {
            self.look_at_devices();
            self.confirm_if_unknown();
        }
        self.limit.set(&mut self.cx, request)?;
        self.apply_limit();
        Ok(status::limit(&self.knowing()))
    }

    fn set_share(&mut self, share: Option<Share>) -> Answer<()> {
        if share.is_some() {
            self.look_at_devices();
            self.confirm_if_unknown();
        }
        if share::set(&mut self.cx, share)? {
            self.apply_limit();
        }
        Ok(())
    }

    fn begin_resize(&mut self, request: ResizeRequest) -> Answer<ResizeReport> {
        request.check()?;
        if let Some(no_room) = self.cx.no_room.as_ref().filter(|_| self.cx.waits()) {
            return Err(ApiError::Unavailable(format!(
                "{} waits for room, and QEMU may, so its size cannot change now: {no_room}",
                self.cx.name()
            )));
        }
        self.resize.look(&mut self.cx)?;
        let Some(target) = resize::target_of(&request) else {
            let shared = self.reclaim.hyperalloc.shared_size();
            let stayed = self.resize.stay(&mut self.cx, request.on_violation, &shared);
            let goal = self.resize.take_goal();
            let pursued = self.pursue_shared(goal);
            return stayed.and_then(|report| pursued.map(|()| report));
        };
        self.look_at_devices();
        self.cx.may_take()?;
        self.confirm();
        let shared = self.reclaim.hyperalloc.shared_size();
        let prepared = self.resize.prepare(&self.cx, target, &shared)?;
        if prepared.is_by_sharing() {
            self.reclaim.hyperalloc.check(&mut self.cx)?;
        }
        let goal = self.resize.begin(&mut self.cx, request, &prepared)?;
        if goal == SharedGoal::Same {
            self.reclaim.hyperalloc.forget_last_change();
        }
        self.pursue_shared(goal)?;
        self.pursue_size();
        self.size_report()
    }

    fn size_report(&self) -> Answer<ResizeReport> {
        self.resize.report(&self.cx, &self.reclaim.hyperalloc.shared_size())
    }

    fn evict(&mut self, want_bytes: u64) -> Answer<EvictReport> {
        let began = Instant::now();
        self.look_at_devices();
        limit::may_evict(&self.cx)?;
        // Also makes the guest's metadata known right after a restart.
        self.confirm();
        let pinned = may_tell_in_flight(&self.cx, &mut OpenFiles::default())?;
        self.cx.begin_to_evict()?;
        self.cx.expect_refills().map_err(failed("the refill threads"))?;
        let mut by_force = ByForce::new(&self.cx, want_bytes, pinned.is_some());
        let blocked = self.evict_by_force(&mut by_force)?;
        let done = by_force.done;
        let saved_bytes = done.frames() * FRAME_BYTES;
        let stopped_by = match blocked {
            Some(why) => why.to_string(),
            None if saved_bytes >= want_bytes => "the amount asked for was reached".into(),
            None => nothing_more(pinned.as_deref()),
        };
        Ok(EvictReport {
            saved_bytes,
            saved_frames: done.frames(),
            abandoned: done.abandoned,
            duration_ns: nanoseconds(began.elapsed()),
            stopped_by,
        })
    }

    /// Evicts step by step. Returns what came in the way meanwhile.
    fn evict_by_force(&mut self, by_force: &mut ByForce) -> Answer<Option<ApiError>> {
        loop {
            if !self.cx.reaching.is_unchanged() {
                self.look_at_devices();
                if let Err(why) = limit::may_evict(&self.cx) {
                    return Ok(Some(why));
                }
            }
            let (goes_on, ended) = by_force.step(&mut self.cx);
            self.route(ended);
            if !goes_on? {
                return Ok(None);
            }
        }
    }

    fn detach(&mut self) -> Answer<DetachReport> {
        self.may_detach()?;
        // The end of the management is put on record once all is back. That write needs no new
        // room, unless this one does.
        if let Err(refused @ ApiError::NoRoom(_)) = self.cx.record.change(|_| {}) {
            return Err(refused);
        }
        let began = Instant::now();
        self.resize.give_balloon_back(&mut self.cx);
        // Else what comes back would wait for what is evicted.
        self.cx.pager.room().set_marks(u64::MAX, u64::MAX);
        let restored_bytes = self.reclaim.give_back_all(&self.cx).map_err(|error| {
            self.apply_limit();
            not_allowed(format!(
                "not all memory could be brought back, so the VM stays managed: {error}"
            ))
        })?;
        self.devices.all_is_back(&self.cx);
        self.begin();
        self.cx.service = None;
        if let Err(error) = detach::detach(&mut self.cx) {
            if self.cx.record.leaving.is_some() {
                self.cx.serve_again();
                return Err(ApiError::Failed(format!("{LEAVING}: {error}")));
            }
            self.manage_on();
            return Err(ApiError::Failed(format!(
                "the VM stays managed, detaching failed: {error}"
            )));
        }
        let duration_ns = nanoseconds(began.elapsed());
        Ok(DetachReport { restored_bytes, duration_ns })
    }

    fn may_detach(&self) -> Answer<()> {
        if !self.cx.record.disks.is_empty() {
            return Err(not_allowed(
                "Ebb serves this VM's disks, so it cannot be detached while it runs: power it off",
            ));
        }
        if !self.cx.record.growth.is_empty() {
            return Err(not_allowed(
                "Ebb serves this VM's virtio-mem devices, so it cannot be detached while it runs: \
                 power it off",
            ));
        }
        Ok(())
    }

    /// Manages the VM as before after a detach that failed: its record has not changed.
    fn manage_on(&mut self) {
        self.cx.serve_again();
        self.trust.forget_watches();
        let record = &self.cx.record;
        let watched = match record.mode == Mode::Strict || record.evicts || record.shares {
            true => self.cx.pager.frames().watch_all(),
            false => Ok(()),
        };
        if let Err(error) = watched {
            tracing::error!("watching its memory: {error}");
        }
        self.cx.record.note(|_| {});
        self.apply_limit();
    }
}
