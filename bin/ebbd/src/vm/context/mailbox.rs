//! What a VM's worker is asked to do, and where.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::{
    AutoRequest, AutoStatus, DetachReport, EvictReport, EvictRequest, HeatReport, HeatRequest,
    LimitRequest, LimitStatus, ReclaimReport, ReclaimRequest, ResizeReport, ResizeRequest,
    VmStatus,
};
use tokio::sync::oneshot;

use super::work::Work;
use crate::model::api_error::Answer;
use crate::model::host_pressure::PressureNotice;
use crate::model::piloted::PlugRequest;
use crate::model::share::Share;

/// The pilot's wish to know what the guest needs holds for this long: it is said anew with each
/// question for figures, which comes at least every few seconds.
const WATCHED_FOR: Duration = Duration::from_secs(30);
/// Most commands of clients that wait. A worker that hangs takes none, and clients ask again.
const WAITING_MOST: usize = 1024;

/// Which free memory to reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    /// All of it.
    All,
    /// All but what keeps coming back although the guest does not use it.
    Lasting,
}

/// What a worker is asked to do. Most commands carry a place for the answer.
pub enum Command {
    /// Tell the whole status. `true`: classify every frame.
    Status(bool, oneshot::Sender<Answer<VmStatus>>),
    /// Reclaim free memory once.
    Reclaim(ReclaimRequest, Which, Arc<Work>, oneshot::Sender<Answer<ReclaimReport>>),
    /// Turn automatic reclaim on or off.
    Auto(AutoRequest, oneshot::Sender<Answer<AutoStatus>>),
    /// Set or lift the limit.
    Limit(LimitRequest, oneshot::Sender<Answer<LimitStatus>>),
    /// So much memory is taken that eviction must begin, or a turn of eviction left more to do.
    Pressure,
    /// Bring the VM to another size.
    Resize(ResizeRequest, oneshot::Sender<Answer<ResizeReport>>),
    /// Tell how far the VM is on its way to its target.
    Size(oneshot::Sender<Answer<ResizeReport>>),
    /// The guest touched unplugged memory.
    Violation,
    /// Evict frames, used or not.
    Evict(EvictRequest, Arc<Work>, oneshot::Sender<Answer<EvictReport>>),
    /// Begin to find out which memory is hot.
    Monitor(HeatRequest, oneshot::Sender<Answer<HeatReport>>),
    /// Tell how far the monitoring is, and what was found.
    Heat(oneshot::Sender<Answer<HeatReport>>),
    /// Put the VM into the pool, or take it out.
    Share(Option<Share>, oneshot::Sender<Answer<()>>),
    /// Keep to the limit that the pool gives the VM.
    Allow(Option<u64>, oneshot::Sender<Answer<()>>),
    /// Keep to the limit that the pilot gives the VM.
    PilotLimit(Option<u64>, oneshot::Sender<Answer<()>>),
    /// Give compressed pages so much memory, by the pilot.
    PilotCompressed(Option<u64>, oneshot::Sender<Answer<()>>),
    /// Have the guest plug or unplug memory, by the pilot.
    PilotPlugged(PlugRequest, oneshot::Sender<Answer<()>>),
    /// Hear of the host's memory, and reclaim if the host is short of it. Answers with the bytes.
    HostPressure(PressureNotice, oneshot::Sender<Answer<u64>>),
    /// Answer as soon as commands are obeyed.
    Ready(oneshot::Sender<Answer<()>>),
    /// Stop managing the VM.
    Detach(oneshot::Sender<Answer<DetachReport>>),
    /// The VMM ended, or its faults cannot be read: why.
    FaultsEnded(std::io::Result<()>),
}

impl Command {
    /// Whether nobody waits for the answer any more: the client was told that nothing was done.
    pub fn is_moot(&self) -> bool {
        match self {
            Command::Status(_, to) => to.is_closed(),
            Command::Reclaim(.., to) => to.is_closed(),
            Command::Auto(_, to) => to.is_closed(),
            Command::Limit(_, to) => to.is_closed(),
            Command::Resize(_, to) => to.is_closed(),
            Command::Size(to) => to.is_closed(),
            Command::Evict(.., to) => to.is_closed(),
            Command::Monitor(_, to) => to.is_closed(),
            Command::Heat(to) => to.is_closed(),
            Command::Share(_, to)
            | Command::PilotLimit(_, to)
            | Command::PilotCompressed(_, to)
            | Command::PilotPlugged(_, to)
            | Command::Ready(to) => to.is_closed(),
            Command::HostPressure(_, to) => to.is_closed(),
            Command::Detach(to) => to.is_closed(),
            Command::Pressure
            | Command::Violation
            | Command::Allow(..)
            | Command::FaultsEnded(_) => false,
        }
    }
}

/// Why a command of a client is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotTaken {
    /// The worker has ended.
    Ended,
    /// Too many wait already.
    Full,
}

/// The clients' way into a worker's mailbox.
#[derive(Clone)]
pub struct Inlet {
    to: Sender<Command>,
    waiting: Arc<AtomicUsize>,
}

impl Inlet {
    /// Puts a command in.
    ///
    /// # Errors
    /// [`NotTaken`]. Nothing is done then.
    pub fn put(&self, command: Command) -> Result<(), NotTaken> {
        if self.waiting.load(Relaxed) >= WAITING_MOST {
            return Err(NotTaken::Full);
        }
        self.waiting.fetch_add(1, Relaxed);
        self.to.send(command).map_err(|_| NotTaken::Ended)
    }
}

/// The way into a worker's mailbox.
#[derive(Clone)]
pub struct Mailbox {
    to: Sender<Command>,
    /// Commands that the worker has not taken yet.
    waiting: Arc<AtomicUsize>,
    /// Pressure was reported, and the worker has not looked at it yet.
    is_pressed: Arc<AtomicBool>,
    /// Commands and ticks that the worker has begun.
    begun: Arc<AtomicU64>,
    /// The worker detaches the VM.
    is_detaching: Arc<AtomicBool>,
    /// When the pilot last wanted to know what the guest needs.
    watched: Arc<Mutex<Option<Instant>>>,
}

impl Mailbox {
    /// Returns an empty mailbox, and the receiver of its commands.
    pub fn new() -> (Mailbox, Receiver<Command>) {
        let (to, commands) = channel();
        let (waiting, is_pressed, begun) = (Arc::default(), Arc::default(), Arc::default());
        let (is_detaching, watched) = (Arc::default(), Arc::default());
        (Mailbox { to, waiting, is_pressed, begun, is_detaching, watched }, commands)
    }

    /// Returns where commands of clients go.
    pub fn inlet(&self) -> Inlet {
        Inlet { to: self.to.clone(), waiting: Arc::clone(&self.waiting) }
    }

    /// Puts a command of this process's own in. A worker that has ended obeys none.
    pub fn put(&self, command: Command) {
        self.waiting.fetch_add(1, Relaxed);
        let _ = self.to.send(command);
    }

    /// Notes that the worker has taken a command.
    pub fn note_taken(&self) {
        let less = |waiting: usize| Some(waiting.saturating_sub(1));
        let _ = self.waiting.fetch_update(Relaxed, Relaxed, less);
    }

    /// Tells the worker of pressure, once until it looks.
    pub fn press(&self) {
        if !self.is_pressed.swap(true, AcqRel) {
            self.put(Command::Pressure);
        }
    }

    /// Whether pressure was reported and the worker has not looked yet.
    pub fn is_pressed(&self) -> bool {
        self.is_pressed.load(Acquire)
    }

    /// Notes that the worker looks at the pressure now.
    pub fn look_at_pressure(&self) {
        self.is_pressed.store(false, Release);
    }

    /// Notes that the worker begins a command or a tick.
    pub fn note_begin(&self) {
        self.begun.fetch_add(1, Relaxed);
    }

    /// Returns how many commands and ticks the worker has begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Relaxed)
    }

    /// Notes whether the worker detaches the VM: it obeys no other command meanwhile.
    pub fn note_detaching(&self, is_detaching: bool) {
        self.is_detaching.store(is_detaching, Relaxed);
    }

    /// Whether the worker detaches the VM.
    pub fn is_detaching(&self) -> bool {
        self.is_detaching.load(Relaxed)
    }

    /// Notes whether the pilot wants to know what the guest needs.
    pub fn note_watched(&self, is_watched: bool) {
        *self.watched() = is_watched.then(Instant::now);
    }

    /// Whether the pilot wants to know what the guest needs. It says so every few seconds: once there
    /// is no daemon, nobody wants to know.
    pub fn is_watched(&self) -> bool {
        self.watched().is_some_and(|at| at.elapsed() < WATCHED_FOR)
    }

    fn watched(&self) -> MutexGuard<'_, Option<Instant>> {
        // It is whole between any two statements that change it.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_cannot_fill_the_mailbox_of_a_worker_that_hangs() {
        let (mailbox, commands) = Mailbox::new();
        let inlet = mailbox.inlet();
        for _ in 0..WAITING_MOST {
            assert_eq!(inlet.put(Command::Violation), Ok(()));
        }
        assert_eq!(inlet.put(Command::Violation), Err(NotTaken::Full));
        // The threads of the VM say each thing once.
        mailbox.press();
        assert_eq!(commands.try_iter().count(), WAITING_MOST + 1);
        (0..=WAITING_MOST).for_each(|_| mailbox.note_taken());
        assert_eq!(inlet.put(Command::Violation), Ok(()));
        drop(commands);
        assert_eq!(inlet.put(Command::Violation), Err(NotTaken::Ended));
    }
}
