//! The worker of one VM: it obeys commands, and at each tick has every controller do what is due.
//! Other threads serve the faults, and they never wait for the worker.

mod obey;
mod routes;
mod size;
mod take;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use ebb_api::{DetachReport, VmStatus};
use ebb_units::FRAME_BYTES;
use tokio::sync::oneshot;

use super::context::VmContext;
use super::context::mailbox::Command;
use super::devices::Devices;
use super::hyperalloc::SharedAllocator;
use super::limit::Limit;
use super::publisher::Publisher;
use super::reclaim::Reclaim;
use super::resize::Resize;
use super::returned::Returned;
use super::small_pages::SmallPages;
use super::status::{self, Knowing};
use super::tiering::Tiering;
use super::trust::Trust;
use super::{detach, member, piloted, times};
use crate::model::api_error::Answer;
use crate::model::figures::MISSED_BYTES;
use crate::support::failpoint;
use crate::support::life::Life;
use crate::support::open_files::OpenFiles;
use crate::system::calibration::Calibrated;

/// Time between two ticks.
const TICK: Duration = Duration::from_millis(200);
/// Longest time between two publications of the figures, unless the worker is busy.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// Shortest time between two publications because the guest misses evicted memory.
const PUBLISH_AGAIN: Duration = Duration::from_millis(150);

/// Why a worker ended.
pub enum Outcome {
    /// The VM is not managed any more. The farewell is to be said once everybody knows that.
    Ended(Option<Farewell>),
    /// A thread of this VM panicked, and has said so.
    Panicked(String),
}

/// Whoever waits to hear that the VM was detached, and the report for them.
pub type Farewell = (oneshot::Sender<Answer<DetachReport>>, DetachReport);

/// All that the worker's thread owns.
pub struct Worker {
    cx: VmContext,
    trust: Trust,
    devices: Devices,
    reclaim: Reclaim,
    hyperalloc: SharedAllocator,
    limit: Limit,
    resize: Resize,
    tiering: Tiering,
    small_pages: SmallPages,
    returned: Returned,
    /// Shows the figures to others.
    publisher: Publisher,
    /// When the figures were published last.
    published: Instant,
    /// Evicted frames that had come back within seconds by then.
    refaulted_frames: u64,
    /// Whether the swap file was removed, as far as the log says.
    swap_is_removed: bool,
}

enum Next {
    Go,
    End(Outcome),
}

impl Worker {
    /// Makes the worker of a VM whose faults are served.
    pub(super) fn new(cx: VmContext, calibrated: Arc<Calibrated>, publisher: Publisher) -> Worker {
        let mailbox = cx.mailbox.clone();
        cx.growth.on_violation(move || mailbox.put(Command::Violation));
        Worker {
            trust: Trust::new(&cx),
            devices: Devices::default(),
            reclaim: Reclaim::default(),
            hyperalloc: SharedAllocator::default(),
            limit: Limit::default(),
            resize: Resize::default(),
            tiering: Tiering::new(&cx, calibrated),
            small_pages: SmallPages::default(),
            returned: Returned::default(),
            publisher,
            published: Instant::now(),
            refaulted_frames: 0,
            swap_is_removed: false,
            cx,
        }
    }

    /// Runs until the VM is not managed any more.
    pub(super) fn run(mut self, commands: &Receiver<Command>) -> Outcome {
        self.publish();
        self.look_at_devices();
        self.begin();
        self.apply_limit();
        let mut due = Instant::now() + TICK;
        loop {
            // The clock decides, however many commands there are.
            let wait = due.saturating_duration_since(Instant::now());
            let pause = self.pause().filter(|&pause| pause < wait);
            let command = match wait.is_zero() {
                true => Err(RecvTimeoutError::Timeout),
                false => commands.recv_timeout(pause.unwrap_or(wait)),
            };
            let next = match command {
                Ok(command) => self.obey(command),
                Err(RecvTimeoutError::Timeout) if pause.is_some() => {
                    self.glance();
                    Next::Go
                }
                Err(RecvTimeoutError::Timeout) => {
                    let next = self.tick();
                    due = Instant::now() + TICK;
                    next
                }
                Err(RecvTimeoutError::Disconnected) => Next::End(Outcome::Ended(None)),
            };
            if let Next::End(outcome) = next {
                return outcome;
            }
            if self.is_publication_due() {
                self.publish();
            }
        }
    }

    /// Returns the time to the next work that does not wait for a tick, if there is any.
    fn pause(&self) -> Option<Duration> {
        let glance = self.devices.glance_after(&self.cx);
        glance.into_iter().chain(self.hyperalloc.step_after(&self.cx)).min()
    }

    fn glance(&mut self) {
        if self.devices.glance_after(&self.cx).is_some() {
            self.glance_at_devices();
        }
        if self.hyperalloc.step_after(&self.cx).is_some() {
            self.with_size(|size| size.step_shared());
        }
    }

    /// Returns all controllers that know a part of the VM's state.
    fn knowing(&self) -> Knowing<'_> {
        let Worker { cx, trust, devices, reclaim, hyperalloc, limit, .. } = self;
        let Worker { resize, tiering, returned, .. } = self;
        Knowing { cx, trust, devices, reclaim, hyperalloc, limit, resize, tiering, returned }
    }

    /// Returns the VM's status. With `counts`, every frame is classified.
    fn status_now(&mut self, counts: bool) -> Answer<VmStatus> {
        self.returned.look(&self.cx)?;
        status::of(&self.knowing(), counts)
    }

    /// Whether the figures are to be published now. The pilot should know soon that the guest misses
    /// evicted memory.
    fn is_publication_due(&self) -> bool {
        let again = self.refaulted_frames().saturating_sub(self.refaulted_frames) * FRAME_BYTES;
        let every = if again >= MISSED_BYTES { PUBLISH_AGAIN } else { PUBLISH_EVERY };
        self.published.elapsed() >= every
    }

    fn refaulted_frames(&self) -> u64 {
        self.cx.pager.counters().refaulted_frames.load(Relaxed)
    }

    /// Publishes the VM's figures.
    fn publish(&mut self) {
        (self.published, self.refaulted_frames) = (Instant::now(), self.refaulted_frames());
        let member = member::of(&self.cx, &mut self.limit, &mut self.tiering);
        self.notice_removed_swap();
        let piloted = piloted::of(&self.cx, &self.limit);
        match (self.status_now(false), member, piloted) {
            (Ok(status), Ok(member), Ok(piloted)) => {
                let times = times::of(&self.cx, &self.reclaim, &self.hyperalloc);
                self.publisher.publish(status, member, Some(piloted), Some(times));
            }
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                tracing::debug!("{error}");
            }
        }
    }

    /// Says in the log once that the swap file was removed.
    fn notice_removed_swap(&mut self) {
        let is_removed = self.cx.pager.residency().is_store_removed();
        if is_removed && !self.swap_is_removed {
            tracing::warn!("{}: {}", self.cx.name(), status::swap_is_removed(&self.cx.record));
        }
        self.swap_is_removed = is_removed;
    }

    /// Does what is due, in this order: memory that QEMU unplugged, devices, record, guest, size,
    /// limit, heat, free memory.
    fn tick(&mut self) -> Next {
        self.cx.mailbox.note_begin();
        if self.cx.service.is_none() {
            self.cx.serve_again();
        }
        if self.cx.record.leaving.is_some() {
            return self.keep_leaving();
        }
        let open = &mut OpenFiles::default();
        self.devices.keep_regions(&mut self.cx, open);
        self.keep_devices(open);
        failpoint::reached("tick", self.cx.name());
        failpoint::may_spin(self.cx.name());
        self.cx.record.save_again();
        self.cx.pager.evictor().free_idle();
        if self.trust.must_stay_stopped() {
            self.trust.bring_back_for_next(&mut self.cx);
        }
        // QEMU itself may be the next to wait for room.
        if !self.cx.waits() {
            self.begin();
        }
        self.small_pages.keep(&mut self.cx);
        self.notice_reset();
        self.reclaim.judge_restored(&self.cx);
        if self.cx.waits() {
            self.keep_limit(open);
            return Next::Go;
        }
        // Trims before evicting: content that comes back to memory need not be evicted again.
        if let Err(error) = self.cx.pager.evictor().trim_store(self.limit.is_idle()) {
            tracing::debug!("trimming: {error}");
        }
        if self.cx.guest.is_due(&self.cx.pager) {
            self.confirm();
        }
        self.keep_shared_size();
        self.with_size(|size| size.keep());
        self.resize.keep_figures(&mut self.cx);
        self.keep_limit(open);
        self.limit.write_back_unlimited(&mut self.cx);
        self.keep_heat();
        self.tiering.keep_placing(&self.cx, self.limit.evicted());
        self.keep_compact();
        self.keep_reclaiming();
        Next::Go
    }

    /// Ends the worker once the VM's userfaultfd is closed, whoever closes it.
    fn keep_leaving(&mut self) -> Next {
        if !detach::is_closed(&self.cx) {
            return Next::Go;
        }
        self.cx.service = None;
        detach::remove_detached(&self.cx.record, self.cx.record.directory());
        Next::End(Outcome::Ended(None))
    }

    /// Handles a VMM that is said to have ended, or whose faults cannot be read.
    fn faults_ended(&mut self, why: io::Result<()>) -> Next {
        let ended = Life::of_handle(&self.cx.process);
        let Ok(Some(dead)) = ended else {
            match (why, ended) {
                // Its memory is freed already: the process will end soon.
                (Ok(()), Ok(_)) => {}
                (Err(error), _) | (_, Err(error)) => {
                    tracing::error!("its faults cannot be read: {error}");
                }
            }
            // Whatever happened, the VMM may still run.
            std::thread::sleep(TICK);
            self.cx.serve_again();
            return Next::Go;
        };
        tracing::info!("QEMU {} ended", self.cx.record.pid);
        self.cx.service = None;
        if let Err(error) = detach::remove_ended(&self.cx, &dead) {
            tracing::error!("{error}");
        }
        Next::End(Outcome::Ended(None))
    }
}
