//! The device as the vhost-user protocol sees it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ebb_vhost::{DESCRIPTORS_MAX, Kept};
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VringMutex};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use crate::backend::CacheMode;
use crate::block_locks::wake_up;
use crate::config;
use crate::ended::Ended;
use crate::job::Disk;
use crate::pause::wait_for;
use crate::queue::Worker;

/// A disk for one front end.
pub(crate) struct Device {
    disk: Arc<Disk>,
    queues: Vec<Queue>,
    cache_mode: CacheMode,
    kept: Arc<Kept>,
    /// Whether a thread that serves this front end has ended.
    ended: Arc<Ended>,
    /// Changes of memory that were requested and are not done. No queue is served while there
    /// are any.
    changes: AtomicU32,
    closing: AtomicBool,
}

struct Queue {
    worker: Mutex<Worker>,
    wake: Arc<OwnedFd>,
    idle: Condvar,
}

impl Queue {
    fn worker(&self) -> MutexGuard<'_, Worker> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device {
    pub(crate) fn new(
        disk: Arc<Disk>,
        memory: &GuestMemoryAtomic<GuestMemoryMmap>,
        queues: u16,
        use_ring: bool,
        cache_mode: CacheMode,
    ) -> io::Result<Device> {
        let kept = Arc::new(Kept::new()?);
        let queue = |_| {
            let worker = Worker::new(disk.clone(), memory.clone(), kept.clone(), use_ring)?;
            let wake = worker.wake().clone();
            Ok(Queue { worker: Mutex::new(worker), wake, idle: Condvar::new() })
        };
        let queues = (0..queues).map(queue).collect::<io::Result<_>>()?;
        let (changes, closing) = (AtomicU32::new(0), AtomicBool::new(false));
        let ended = Ended::new()?;
        Ok(Device { disk, queues, cache_mode, kept, ended, changes, closing })
    }

    /// Returns the event that queue `index`'s thread must listen to, and that event's number.
    pub(crate) fn wake_event(&self, index: usize) -> Option<(RawFd, u64)> {
        let number = self.wake_number() as u64;
        self.queues.get(index).map(|queue| (queue.wake.as_raw_fd(), number))
    }

    /// Has each queue's thread note its end from now on.
    pub(crate) fn watch_threads(&self) {
        self.queues.iter().for_each(|queue| wake_up(&queue.wake));
    }

    /// Returns whether a thread that serves this front end has ended.
    pub(crate) fn ended(&self) -> &Ended {
        &self.ended
    }

    /// The number of a queue's wake event. Smaller ones are those of kicks, and one of the
    /// library's own.
    fn wake_number(&self) -> usize {
        self.queues.len() + 1
    }

    /// Ends the queues' threads. The library would leak a descriptor with each thread that it ends
    /// itself.
    pub(crate) fn close(&self) {
        self.closing.store(true, SeqCst);
        self.queues.iter().for_each(|queue| wake_up(&queue.wake));
        self.wake_waiting();
    }

    /// Returns the memory that the front end shares.
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Stops all queues, because the front end requests a change of its memory. The library maps
    /// the new memory and lets the queues use it before it tells us. The queues stay stopped until
    /// the memory is guarded.
    pub(crate) fn pause(&self) {
        self.changes.fetch_add(1, SeqCst);
        // A thread that serves now sees the old memory. This waits for it.
        self.queues.iter().for_each(|queue| drop(queue.worker()));
    }

    /// Whether a change of memory was requested and is not done.
    pub(crate) fn is_paused(&self) -> bool {
        self.changes.load(SeqCst) > 0
    }

    fn wake_waiting(&self) {
        for queue in &self.queues {
            // A thread that is about to wait keeps the lock until it waits.
            let _worker = queue.worker();
            queue.idle.notify_all();
        }
    }

    fn is_closing(&self) -> bool {
        self.closing.load(SeqCst)
    }

    /// Serves the queue of a thread. An error ends the thread.
    fn serve(&self, vrings: &[VringMutex], thread: usize, event: u16) -> io::Result<()> {
        let (Some(queue), [vring]) = (self.queues.get(thread), vrings) else { return Ok(()) };
        let mut worker = queue.worker();
        while self.is_paused() && !self.is_closing() {
            worker = queue.idle.wait(worker).unwrap_or_else(PoisonError::into_inner);
        }
        if self.is_closing() {
            // Nobody looks at the error.
            return Err(io::ErrorKind::Interrupted.into());
        }
        worker.serve(vring, usize::from(event) == self.wake_number());
        if worker.is_still() {
            queue.idle.notify_all();
        }
        let pause = worker.pause();
        // A thread that wants to stop the queue must not wait for the pause.
        drop(worker);
        if let Some(pause) = pause
            && !wait_for(&queue.wake, pause)
        {
            wake_up(&queue.wake);
        }
        Ok(())
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = VringMutex;

    fn num_queues(&self) -> usize {
        self.queues.len()
    }

    fn max_queue_size(&self) -> usize {
        DESCRIPTORS_MAX as usize
    }

    fn features(&self) -> u64 {
        config::features(self.disk.image.is_readonly())
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn acked_features(&self, features: u64) {
        self.disk.config.negotiated(features);
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&self, _: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        self.disk.config.read(offset, size)
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        let writeback = self.disk.config.write(offset, bytes);
        let writeback = writeback.ok_or(io::ErrorKind::InvalidInput)?;
        self.cache_mode.store(writeback)
    }

    /// Guards the new memory, which is the one that the workers use.
    fn update_memory(&self, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> io::Result<()> {
        // The thread that answers the front end.
        self.ended.note_end();
        self.kept.keep(memory.memory().into_inner())?;
        if self.changes.fetch_sub(1, SeqCst) == 1 {
            self.wake_waiting();
        }
        Ok(())
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        (0..self.queues.len()).map(|index| 1 << index).collect()
    }

    /// Waits until every transfer has ended. The front end takes our answer for all that we have
    /// seen of the queue, and may then reuse its memory. A request whose end the driver does not
    /// know, because it or one before it waits for memory, counts as not seen.
    fn stop_vring(&self, index: u32) -> io::Result<()> {
        let Some(queue) = self.queues.get(index as usize) else { return Ok(()) };
        let mut worker = queue.worker();
        worker.stopping();
        while !worker.is_still() && !self.is_closing() {
            worker = queue.idle.wait(worker).unwrap_or_else(PoisonError::into_inner);
        }
        worker.stopped();
        Ok(())
    }

    fn handle_event(
        &self,
        event: u16,
        _: EventSet,
        vrings: &[VringMutex],
        thread: usize,
    ) -> io::Result<()> {
        self.ended.note_end();
        let served = self.disk.panics.catch(|| self.serve(vrings, thread, event));
        served.unwrap_or_else(|| Err(io::Error::other("it panicked")))
    }
}
