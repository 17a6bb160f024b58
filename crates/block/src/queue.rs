//! The requests of one queue, from the available ring to the used ring. They run side by side,
//! and end in the order in which they were made available. So the used index alone tells a
//! successor what is still to be done (docs/decisions/0010-*).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_sys::uring::Ring;
use ebb_units::Gpa;
use ebb_vhost::{Access, DmaFault, Guest, Kept, Malformed, Pinned, Segment, walk};
use rustix::event::{EventfdFlags, eventfd};
use vhost_user_backend::{VringMutex, VringT};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use crate::block_locks::wake_up;
use crate::counters::add;
use crate::job::{Buffers, Disk, Job, Step};
use crate::patience::Patience;
use crate::pause::Pause;
use crate::request::{self, Halted, Request, Status, StatusByte};

/// Most transfers that the kernel is told of at once. More wait.
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

/// Why there is no request to begin.
enum Unread {
    /// It has ended.
    Ended,
    /// It cannot be read now, or never. If never, the queue is broken.
    Waits,
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
    pub(crate) fn is_idle(&self) -> bool {
        match self.broken {
            true => self.jobs.is_empty(),
            false => self.order.is_empty() && self.pause().is_none(),
        }
    }

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
    /// the driver was not told of are left in the queue as if never taken, and are done then.
    pub(crate) fn stopped(&mut self) {
        if let Some(vring) = self.vring.take() {
            let undone = self.order.len() as u16;
            vring.set_queue_next_avail(vring.queue_next_avail().wrapping_sub(undone));
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
    /// and the DMA.
    pub(crate) fn serve(&mut self, vring: &VringMutex) {
        self.vring.get_or_insert_with(|| vring.clone());
        let end = Instant::now() + TURN;
        loop {
            if self.round(vring) {
                // Do not go on at once: an event that ends this thread gets its turn.
                return wake_up(&self.wake);
            }
            if !self.look(vring) || Instant::now() >= end {
                return;
            }
        }
    }

    /// Handles what has come by now. Whether another round is needed at once.
    fn round(&mut self, vring: &VringMutex) -> bool {
        let mut count = [0; 8];
        // If there is nothing to read, another event woke this thread.
        let _ = rustix::io::read(&self.wake, &mut count);
        self.reap();
        if self.pause.is_over() {
            self.stalled = false;
            self.go_on_later();
        }
        let more = self.take(vring);
        self.begin_waiting();
        if let Some(Err(error)) = self.ring.as_mut().map(Ring::submit) {
            tracing::error!("{}: io_uring: {error}", self.disk.image.path().display());
        }
        self.publish(vring);
        // A request that waits for a buffer begins once these are free.
        let more = more || self.buffers.is_exhausted();
        self.buffers.teach(&self.disk);
        more
    }

    /// Polls for a while for the disk to answer, or for the driver to make a request available.
    fn look(&mut self, vring: &VringMutex) -> bool {
        let [answer, question] = &mut self.patience;
        match &mut self.ring {
            Some(ring) if !self.jobs.is_empty() => answer.look(|| ring.has_ended()),
            // Rings that are not pinned may be non-resident.
            _ if self.broken || self.table.is_none() || !self.waiting.is_empty() => false,
            _ => {
                let memory = self.memory.memory();
                question.look(|| {
                    let state = vring.get_ref();
                    let queue = state.get_queue();
                    let asked = queue.avail_idx(&*memory, Ordering::Acquire);
                    queue.ready() && asked.is_ok_and(|asked| asked.0 != queue.next_avail())
                })
            }
        }
    }

    /// Takes requests from the available ring. Whether more were made available meanwhile.
    fn take(&mut self, vring: &VringMutex) -> bool {
        let mut state = vring.get_mut();
        if self.broken || !state.get_queue().ready() {
            return false;
        }
        let memory = self.memory.memory();
        let queue = state.get_queue_mut();
        if self.table.is_none() && (self.stalled || !self.pin_rings(queue)) {
            return false;
        }
        let room = usize::from(queue.size()).saturating_sub(self.order.len());
        // Requests that wait are woken when another ends. No room means that the driver made more
        // available than the queue has room for.
        if room == 0 || !self.waiting.is_empty() {
            return false;
        }
        if queue.disable_notification(&*memory).is_err() {
            self.give_up("its used ring is in no memory");
            return false;
        }
        match queue.iter(memory.clone()) {
            Ok(chains) => {
                let next = self.first_number + self.order.len() as u64;
                let count = self.order.len();
                for (number, chain) in (next..).zip(chains.take(room)) {
                    self.order.push_back(Slot { head: chain.head_index(), written: None });
                    self.waiting.push_back(Waiting { number, parsed: None });
                }
                if self.order.len() > count {
                    self.patience[1].came();
                }
            }
            Err(error) => {
                self.give_up(&error.to_string());
                return false;
            }
        }
        queue.enable_notification(&*memory).unwrap_or(false)
    }

    fn pin_rings(&mut self, queue: &impl QueueT) -> bool {
        // Section 2.7: sizes of the three parts, with event indices.
        let (size, count) = (queue.size(), u32::from(queue.size()));
        let segment = |gpa, bytes| Segment { gpa: Gpa(gpa), bytes };
        let rings = vec![
            segment(queue.desc_table(), 16 * count),
            segment(queue.avail_ring(), 6 + 2 * count),
            segment(queue.used_ring(), 6 + 8 * count),
        ];
        match self.guest().pin(rings, Access::Keep) {
            Ok(pinned) => {
                self.table = Some(Table { gpa: Gpa(queue.desc_table()), size, _pinned: pinned });
                true
            }
            Err(fault) => {
                self.wait_or_give_up(fault);
                false
            }
        }
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
    }

    /// Begins requests in order. One that must wait holds up those behind it, or else it might
    /// wait for ever.
    fn begin_waiting(&mut self) {
        while !self.broken
            && !self.stopping
            && let Some(Waiting { number, parsed }) = self.waiting.pop_front()
        {
            let parsed = match parsed {
                None if self.stalled => Err(Unread::Waits),
                None => self.parse(number),
                Some(parsed) => Ok(parsed),
            };
            let parsed = match parsed {
                Ok(parsed) => self.begin(number, parsed).map(Some),
                Err(Unread::Ended) => None,
                Err(Unread::Waits) => Some(None),
            };
            if let Some(parsed) = parsed {
                return self.waiting.push_front(Waiting { number, parsed });
            }
        }
    }

    /// Reads a request, and ends it if it is not valid. A chain that cannot be read, or that has
    /// no place for a status, never goes into the used ring: the driver would take the bytes at
    /// that place for the status.
    fn parse(&mut self, number: u64) -> Result<Parsed, Unread> {
        let (Some(head), guest) = (self.slot(number).map(|slot| slot.head), self.guest()) else {
            return Err(Unread::Ended);
        };
        let Some(table) = &self.table else { return Err(Unread::Waits) };
        let chain = match walk(&guest, table.gpa, table.size, head) {
            Ok(chain) => chain,
            Err(Malformed::Memory(fault)) => return Err(self.unread(fault)),
            Err(malformed) => {
                self.give_up(&malformed.to_string());
                return Err(Unread::Waits);
            }
        };
        let status = match StatusByte::pin(&guest, &chain) {
            Some(Ok(status)) => status,
            Some(Err(fault)) => return Err(self.unread(fault)),
            None => {
                self.give_up("a request has no place for its status");
                return Err(Unread::Waits);
            }
        };
        match request::parse(&guest, &chain, self.disk.limits()) {
            Ok(request) => {
                self.pause.shorten();
                Ok(Parsed { guest, request, status })
            }
            Err(Halted::Ended(refusal)) => {
                self.end(number, status, refusal, 0);
                Err(Unread::Ended)
            }
            Err(Halted::NotNow) => {
                self.stall();
                Err(Unread::Waits)
            }
        }
    }

    fn unread(&mut self, fault: DmaFault) -> Unread {
        self.wait_or_give_up(fault);
        Unread::Waits
    }

    /// Begins a request, or gives it back if it must wait.
    fn begin(&mut self, number: u64, parsed: Parsed) -> Option<Parsed> {
        if self.buffers.is_exhausted() {
            return Some(parsed);
        }
        let spans = parsed.request.spans();
        let held = match spans.is_empty() {
            true => None,
            false => match self.disk.locks.try_lock(&spans, &self.wake) {
                None => return Some(parsed),
                held => held,
            },
        };
        let Parsed { guest, request, status } = parsed;
        let (job, step) = Job::begin(&self.disk, &mut self.buffers, guest, status, request, held);
        self.go_on(number, job, step);
        None
    }

    /// Takes steps until a transfer runs in the ring, the request must wait, or it has ended.
    fn go_on(&mut self, number: u64, mut job: Job, mut step: Step) {
        loop {
            match (step, &mut self.ring) {
                (Step::Run(transfer), Some(ring)) => {
                    ring.begin(number, transfer);
                    self.jobs.insert(number, job);
                    return;
                }
                (Step::Run(transfer), None) => {
                    let (result, memory) = transfer.run();
                    step = job.ended(&self.disk, &mut self.buffers, result, memory);
                }
                (Step::Later, _) => {
                    self.pause.begin();
                    self.later.insert(number, job);
                    return;
                }
                (Step::Over(status, data_bytes), _) => {
                    // Its frames are unpinned before the driver hears of its end.
                    self.end(number, job.into_status(), status, data_bytes);
                    return;
                }
            }
        }
    }

    /// Tries again the requests whose memory was not available.
    fn go_on_later(&mut self) {
        if self.broken || self.stopping {
            return;
        }
        let count = self.later.len();
        for (number, mut job) in std::mem::take(&mut self.later) {
            let step = job.again(&self.disk, &mut self.buffers);
            self.go_on(number, job, step);
        }
        if self.later.len() < count {
            self.pause.shorten();
        }
    }

    fn reap(&mut self) {
        let mut ended = Vec::new();
        if let Some(ring) = &mut self.ring {
            ring.reap(|done| ended.push(done));
        }
        if !ended.is_empty() {
            self.patience[0].came();
        }
        for done in ended {
            let Some(mut job) = self.jobs.remove(&done.token) else { continue };
            let step = job.ended(&self.disk, &mut self.buffers, done.result, done.memory);
            self.go_on(done.token, job, step);
        }
    }

    fn slot(&mut self, number: u64) -> Option<&mut Slot> {
        let place = number.checked_sub(self.first_number)?;
        self.order.get_mut(usize::try_from(place).ok()?)
    }

    /// Writes the status after the data. A request whose status cannot be written does not end.
    fn end(&mut self, number: u64, place: StatusByte, status: Status, data_bytes: u32) {
        if status != Status::Ok {
            add(&self.disk.counters.failed, 1);
        }
        if !place.tell(status) {
            self.give_up("a request's status cannot be told");
        } else if let Some(slot) = self.slot(number) {
            slot.written = Some(data_bytes.saturating_add(1));
        }
    }

    /// Tells the driver of each request that has ended, if all before it have too.
    fn publish(&mut self, vring: &VringMutex) {
        if self.kept.is_broken() {
            // What was read or written there is void. The front end is disconnected.
            self.broken = true;
            return;
        }
        let mut state = vring.get_mut();
        let mut any = false;
        while let Some(&Slot { head, written: Some(written) }) = self.order.front() {
            self.order.pop_front();
            self.first_number += 1;
            if state.add_used(head, written).is_err() {
                self.broken = true;
            }
            any = true;
        }
        if !any && !self.must_signal {
            return;
        }
        let wanted = state.needs_notification().unwrap_or(true);
        if (wanted || self.must_signal) && state.signal_used_queue().is_err() {
            tracing::debug!("the front end does not take signals any more");
        }
        self.must_signal = false;
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Close the ring before the jobs drop their pins: the kernel may still write.
        self.ring = None;
    }
}
