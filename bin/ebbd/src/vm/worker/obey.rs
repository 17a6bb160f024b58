//! What the worker does with a command.

use std::time::Instant;

use ebb_api::{DetachReport, LimitRequest, LimitStatus, ResizeReport, ResizeRequest};
use ebb_pager::OpenGate;
use tokio::sync::oneshot;

use super::{Next, Worker, detach, status};
use crate::model::api_error::{Answer, ApiError, not_allowed};
use crate::model::host_pressure::PressureNotice;
use crate::model::share::Share;
use crate::support::nanoseconds::nanoseconds;
use crate::support::open_files::OpenFiles;
use crate::vm::context::mailbox::Command;
use crate::vm::limit::{by_pilot, share};
use crate::vm::resize;

impl Worker {
    /// Carries out a command, unless nobody waits for its answer any more.
    pub(super) fn obey(&mut self, command: Command) -> Next {
        self.cx.mailbox.note_taken();
        if command.is_moot() {
            return Next::Go;
        }
        self.cx.mailbox.note_begin();
        let asks_qemu = match command {
            Command::Status(..) | Command::Heat(_) => false,
            Command::Pressure | Command::Ready(_) => false,
            Command::HostPressure(PressureNotice { why: None, .. }, _) => false,
            Command::Resize(..)
            | Command::Size(_)
            | Command::PilotPlugged(..)
            | Command::HostPressure(..) => !self.cx.waits(),
            _ => true,
        };
        // The command may need QEMU, and QEMU may wait for room.
        let _gate = asks_qemu.then(|| OpenGate::for_touches(self.cx.pager.room()));
        self.devices.glance_at_regions(&mut self.cx);
        self.notice_reset();
        self.glance_at_devices();
        self.carry_out(command)
    }

    fn carry_out(&mut self, command: Command) -> Next {
        match command {
            Command::Status(counts, to) => drop(to.send(self.status(counts))),
            Command::Ready(to) => drop(to.send(Ok(()))),
            Command::Reclaim(request, which, work, to) => {
                let keep_bytes = self.cx.record.auto.keep_bytes;
                let want_bytes = request.bytes.unwrap_or(u64::MAX);
                drop(to.send(self.take(want_bytes, keep_bytes, which, &work)));
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
                self.with_size(|size| size.keep());
                drop(to.send(self.with_size(|size| size.report())));
            }
            Command::Violation => self.hyperalloc.violated(&mut self.cx),
            Command::Evict(request, work, to) => {
                drop(to.send(self.evict(request.bytes, &work)));
            }
            Command::Monitor(request, to) => {
                let asked = self.tiering.ask(&self.cx, request);
                if let Ok(true) = asked {
                    self.keep_heat();
                }
                drop(to.send(asked.map(|_| self.tiering.report())));
            }
            Command::Heat(to) => drop(to.send(Ok(self.tiering.report()))),
            Command::Share(share, to) => {
                self.publish_and_answer(to, |worker| worker.set_share(share));
            }
            Command::Allow(limit_bytes, to) => {
                if share::allow(&mut self.cx, limit_bytes) {
                    self.apply_limit();
                }
                self.publish();
                drop(to.send(Ok(())));
            }
            Command::PilotLimit(limit_bytes, to) => {
                self.publish_and_answer(to, |worker| worker.set_pilot_limit(limit_bytes));
            }
            Command::PilotCompressed(bytes, to) => {
                self.publish_and_answer(to, |worker| worker.set_pilot_compressed(bytes));
            }
            Command::PilotPlugged(request, to) => {
                let plug = |it: &mut Worker| it.resize.plug_by_pilot(&mut it.cx, request);
                self.publish_and_answer(to, plug);
            }
            Command::HostPressure(notice, to) => drop(to.send(Ok(self.hear_of_host(notice)))),
            Command::Detach(to) => {
                self.cx.mailbox.note_detaching(true);
                let detached = self.detach();
                self.cx.mailbox.note_detaching(false);
                match detached {
                    Ok(report) => return Next::End(Some((to, report))),
                    Err(refused) => drop(to.send(Err(refused))),
                }
            }
            Command::FaultsEnded(why) => return self.faults_ended(why),
        }
        Next::Go
    }

    /// Carries out something, and answers once others can see what has changed.
    fn publish_and_answer<T>(
        &mut self,
        to: oneshot::Sender<Answer<T>>,
        carry_out: impl FnOnce(&mut Worker) -> Answer<T>,
    ) {
        let answer = carry_out(self);
        self.publish();
        drop(to.send(answer));
    }

    fn status(&mut self, counts: bool) -> Answer<ebb_api::VmStatus> {
        if !self.cx.waits() {
            self.confirm_if_unknown();
            self.resize.glance_for_status(&mut self.cx);
        }
        self.reclaim.judge_restored(&self.cx);
        self.status_now(counts)
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

    fn set_pilot_limit(&mut self, limit_bytes: Option<u64>) -> Answer<()> {
        // A guest that misses memory does not wait for QEMU's answers: a higher limit needs none.
        if by_pilot::is_lower(&self.cx, limit_bytes) {
            self.look_for_pilot();
            self.confirm_if_unknown();
        }
        if by_pilot::set(&mut self.cx, limit_bytes)? {
            self.apply_limit();
        }
        Ok(())
    }

    /// Looks at the devices if need be, as before each eviction: the pilot lowers a limit often.
    /// Before the first eviction, nobody has asked lately about a migration.
    fn look_for_pilot(&mut self) {
        match self.cx.reaching.is_complete && self.cx.record.evicts {
            true => self.keep_devices(&mut OpenFiles::default()),
            false => self.look_at_devices(),
        }
    }

    fn set_pilot_compressed(&mut self, bytes: Option<u64>) -> Answer<()> {
        if bytes.is_some() {
            self.look_at_devices();
        }
        by_pilot::compress(&mut self.cx, bytes)
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
                "{} waits for room, and QEMU may, too, so its size cannot change now: {no_room}",
                self.cx.name()
            )));
        }
        self.resize.look(&mut self.cx)?;
        let Some(target) = resize::target_of(&request) else {
            return self.with_size(|size| size.stay(request.on_violation));
        };
        self.look_at_devices();
        self.cx.may_take()?;
        self.confirm();
        self.with_size(|size| size.begin(request, target))?;
        self.with_size(|size| size.report())
    }

    fn detach(&mut self) -> Answer<DetachReport> {
        detach::may_detach(&mut self.cx)?;
        let began = Instant::now();
        self.resize.plug_again(&mut self.cx).map_err(|error| {
            not_allowed(format!(
                "its guest cannot be given back what it unplugged for the pilot, so the VM stays \
                 managed: {error}"
            ))
        })?;
        self.resize.give_balloon_back(&mut self.cx);
        // Else what comes back would wait for what is evicted.
        let _gate = OpenGate::for_faults(self.cx.pager.room());
        let zeros = detach::zeros(&self.cx);
        let restored_bytes = self.hyperalloc.give_back_all(&self.cx, zeros).map_err(|error| {
            not_allowed(format!(
                "not all memory could be brought back, so the VM stays managed: {error}"
            ))
        })?;
        self.devices.all_is_back(&self.cx);
        self.begin();
        if let Err(refused) = detach::detach(&mut self.cx) {
            if self.cx.record.leaving.is_none() {
                self.trust.forget_watches();
            }
            return Err(refused);
        }
        let duration_ns = nanoseconds(began.elapsed());
        Ok(DetachReport { restored_bytes, duration_ns })
    }
}
