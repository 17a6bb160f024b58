//! The requests of one queue, from the available ring to the used ring. They run side by side,
//! and end in the order in which they were made available. So the used index alone tells a
//! successor what is still to be done (docs/decisions/0010-*).

mod requests;
mod rings;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_sys::uring::Ring;
use ebb_units::Gpa;
use ebb_vhost::{DmaFault, Guest, Kept, Pinned};
use rustix::event::{EventfdFlags, eventfd};
use vhost_user_backend::{VringMutex, VringT};
use virtio_queue::QueueT;
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use crate::block_locks::wake_up;
use crate::job::{Buffers, Disk, Job};
use crate::patience::Patience;
use crate::pause::Pause;
use crate::request::{Request, StatusByte};

/// Most transfers that the kernel gets at once. More wait.
const RING_ENTRIES: u32 = 256;

/// Longest time to poll for events before other events of this thread are handled.
const TURN: Duration = Duration::from_millis(2);

/// The state of one queue. Only its own thread serves it.
pub(crate) struct Worker {
    disk: Arc<Disk>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    /// Tells whether the guest's memory is all there.
    kept: Arc<Kept>,
    /// Becomes readable when [`Worker::serve`] is to be called.
    wake: Arc<OwnedFd>,
    /// `None`: transfers run in this thread.
    ring: Option<Ring>,
    /// Requests that were made available and not yet put into the used ring, oldest first.
    order: VecDeque<Slot>,
    /// The number of the oldest request in `order`.
    first_number: u64,
    /// Requests whose transfer runs, by number.
    jobs: HashMap<u64, Job>,
    /// Requests that go on once memory that they need is available, by number.
    later: BTreeMap<u64, Job>,
    /// Requests that have not begun, oldest first.
    waiting: VecDeque<Waiting>,
    /// Time until the next try for memory that was not available.
    pause: Pause,
    /// Whether the rings or the oldest of `waiting` need memory that was not available.
    stalled: bool,
    buffers: Buffers,
    /// For the disk to answer, and for the driver to make requests available.
    patience: [Patience; 2],
    table: Option<Table>,
    /// Whether to signal even if nothing ends: a predecessor may have ended requests without.
    must_signal: bool,
    /// The rings make no sense. Nothing more is taken from them until they are set up again.
    broken: bool,
    /// The front end waits for the queue to be still.
    stopping: bool,
    /// The queue, from the first time that it is served.
    vring: Option<VringMutex>,
}

/// A request that was made available.
struct Slot {
    head: u16,
    /// The bytes written into guest memory, once it has ended.
    written: Option<u32>,
}

struct Waiting {
    number: u64,
    /// `None`: it was not read yet.
    parsed: Option<Parsed>,
}

struct Parsed {
    guest: Guest,
    request: Request,
    status: StatusByte,
}

/// The descriptor table. All three parts of the queue are pinned.
struct Table {
    gpa: Gpa,
    size: u16,
    _pinned: Pinned,
}

impl Worker {
    pub(crate) fn new(
        disk: Arc<Disk>,
        memory: GuestMemoryAtomic<GuestMemoryMmap>,
        kept: Arc<Kept>,
        use_ring: bool,
    ) -> std::io::Result<Worker> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let ring = use_ring.then(|| Ring::new(RING_ENTRIES, &*wake)).and_then(|ring| {
            ring.inspect_err(|error| tracing::info!("no io_uring here ({error})")).ok()
        });
        Ok(Worker {
            disk,
            memory,
            kept,
            wake,
            ring,
            order: VecDeque::new(),
            first_number: 0,
            jobs: HashMap::new(),
            later: BTreeMap::new(),
            waiting: VecDeque::new(),
            pause: Pause::default(),
            stalled: false,
            buffers: Buffers::default(),
            patience: Default::default(),
            table: None,
            must_signal: true,
            broken: false,
            stopping: false,
            vring: None,
        })
    }

    pub(crate) fn wake(&self) -> &Arc<OwnedFd> {
        &self.wake
    }

    /// Whether all requests taken from the queue are answered, or never will be.
    #[cfg(feature = "testing")]
    pub(crate) fn is_idle(&self) -> bool {
        match self.broken {
            true => self.jobs.is_empty(),
            false => self.order.is_empty() && self.pause().is_none(),
        }
    }

    /// Whether requests are taken from the queue.
    #[cfg(feature = "testing")]
    pub(crate) fn runs(&self) -> bool {
        !self.broken
    }

    /// Whether no transfer runs, so that the queue can be stopped.
    pub(crate) fn is_still(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Begins no more requests, because the queue is to be stopped.
    pub(crate) fn stopping(&mut self) {
        self.stopping = true;
    }

    /// Resets the state after the queue was stopped, as it may come back as another. Requests that
    /// whose end the driver does not know are left in the queue as if never taken, and are done
    /// then. The driver is to kick the queue when it makes more available.
    pub(crate) fn stopped(&mut self) {
        if let Some(vring) = self.vring.take() {
            let undone = self.order.len() as u16;
            vring.set_queue_next_avail(vring.queue_next_avail().wrapping_sub(undone));
            // A queue that was stopped while it was served has asked for no kicks. Its next server,
            // which may be another program, may look at it only once it is kicked.
            if self.table.is_some() {
                let _ = vring.enable_notification();
            }
        }
        self.first_number += self.order.len() as u64;
        self.order.clear();
        self.waiting.clear();
        self.later.clear();
        self.pause = Pause::default();
        (self.table, self.must_signal) = (None, true);
        (self.stalled, self.broken, self.stopping) = (false, false, false);
    }

    /// Returns how long not to serve it, unless it is woken.
    pub(crate) fn pause(&self) -> Option<Duration> {
        self.pause.rest().filter(|_| !self.broken && !self.stopping)
    }

    /// Does all there is to do, and what comes soon after. It waits for nothing but the observer
    /// and the DMA. `is_woken`: [`Worker::wake`] is readable.
    pub(crate) fn serve(&mut self, vring: &VringMutex, mut is_woken: bool) {
        self.vring.get_or_insert_with(|| vring.clone());
        let end = Instant::now() + TURN;
        loop {
            if self.round(vring, is_woken) {
                // Do not go on at once: an event that ends this thread gets its turn.
                return wake_up(&self.wake);
            }
            if !self.look(vring) || Instant::now() >= end {
                if self.listen(vring) {
                    wake_up(&self.wake);
                }
                return;
            }
            is_woken = false;
        }
    }

    /// Handles what has come by now. Whether another round is needed at once.
    fn round(&mut self, vring: &VringMutex, is_woken: bool) -> bool {
        // Ends of transfers make it readable. If anybody else does so, it stays readable and wakes
        // this thread again.
        if is_woken || !self.jobs.is_empty() {
            let mut count = [0; 8];
            // If there is nothing to read, no transfer has ended.
            let _ = rustix::io::read(&self.wake, &mut count);
        }
        self.reap();
        if self.pause.is_over() {
            self.stalled = false;
            self.go_on_later();
        }
        self.take(vring);
        self.begin_waiting();
        if let Some(Err(error)) = self.ring.as_mut().map(Ring::submit) {
            tracing::error!("{}: io_uring: {error}", self.disk.image.path().display());
        }
        self.publish(vring);
        // A request that waits for a buffer begins once these are free. Where transfers have the
        // buffers, the end of one wakes this thread.
        let was_exhausted = self.buffers.is_exhausted();
        self.buffers.teach(&self.disk);
        was_exhausted && !self.buffers.is_exhausted()
    }

    /// Polls for a while for the disk to answer, or for the driver to make a request available. A
    /// request that comes while the disk works begins at once: both can work on several.
    fn look(&mut self, vring: &VringMutex) -> bool {
        let (may_take, memory) = (self.may_take(), self.memory.memory());
        let is_asked = || may_take && has_more(vring, &memory);
        let [answer, question] = &mut self.patience;
        match &mut self.ring {
            Some(ring) if !self.jobs.is_empty() => answer.look(|| ring.has_ended() || is_asked()),
            _ if !may_take => false,
            _ => question.look(is_asked),
        }
    }

    /// Whether requests are taken if there are any. Rings that are not pinned may be non-resident.
    fn may_take(&self) -> bool {
        let has_room = |table: &Table| self.order.len() < usize::from(table.size);
        !self.broken && self.waiting.is_empty() && self.table.as_ref().is_some_and(has_room)
    }

    fn wait_or_give_up(&mut self, fault: DmaFault) {
        match fault.passes() {
            true => self.stall(),
            false => self.give_up(&fault.to_string()),
        }
    }

    /// Reads nothing more of the queue until the pause is over.
    fn stall(&mut self) {
        self.stalled = true;
        self.pause.begin();
    }

    fn guest(&self) -> Guest {
        let Disk { dma, counters, .. } = &*self.disk;
        Guest::new(self.memory.memory().into_inner(), dma.clone(), counters.dma_faults.clone())
    }

    fn give_up(&mut self, why: &str) {
        tracing::warn!("{}: a queue makes no sense: {why}", self.disk.image.path().display());
        self.broken = true;
        // They never end. Other queues may wait for their blocks.
        self.later.clear();
    }
}

/// Whether the driver has made requests available that were not taken. The rings are pinned.
fn has_more(vring: &VringMutex, memory: &GuestMemoryMmap) -> bool {
    let state = vring.get_ref();
    let queue = state.get_queue();
    let asked = queue.avail_idx(memory, Ordering::Acquire);
    let serves = state.is_enabled() && queue.ready();
    serves && asked.is_ok_and(|asked| asked.0 != queue.next_avail())
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Close the ring before the jobs drop their pins: the kernel may still write.
        self.ring = None;
    }
}
