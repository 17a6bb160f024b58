//! One queue's requests, from the available ring to the used ring. They run side by
//! side, and end in the order in which they were made available: the used index
//! alone then tells a successor what is still to be done (docs/decisions/0010-*).

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_sys::uring::Ring;
use ebb_units::Gpa;
use ebb_vhost::{Access, Chain, Guest, Kept, Pinned, Segment, walk};
use rustix::event::{EventfdFlags, eventfd};
use vhost_user_backend::{VringMutex, VringT};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use crate::block_locks::wake_up;
use crate::counters::add;
use crate::job::{Buffers, Disk, Job, Step};
use crate::patience::Patience;
use crate::request::{self, Request, Status};

/// Transfers that the kernel is told of at once; more wait.
const RING_ENTRIES: u32 = 256;

/// So long it looks for events itself, before others of its thread get their turn.
const TURN: Duration = Duration::from_millis(2);

/// The state of one queue. Only its own thread serves it.
pub(crate) struct Worker {
    disk: Arc<Disk>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    /// Tells whether it is all there.
    kept: Arc<Kept>,
    /// Readable when [`Worker::serve`] is to be called.
    wake: Arc<OwnedFd>,
    /// None: transfers run in this thread.
    ring: Option<Ring>,
    /// All that was made available and not yet told to be used, oldest first.
    order: VecDeque<Slot>,
    /// The number of the oldest.
    first_number: u64,
    /// Those of them that have begun, by number.
    jobs: HashMap<u64, Job>,
    /// Those of them that have not, oldest first.
    waiting: VecDeque<Waiting>,
    buffers: Buffers,
    /// For the disk to answer, and for the driver to ask.
    patience: [Patience; 2],
    table: Option<Table>,
    /// What may have ended before us was perhaps not signalled.
    must_signal: bool,
    /// The rings make no sense: nothing more is taken from them until they are set
    /// up anew.
    broken: bool,
}

/// A request that was made available.
struct Slot {
    head: u16,
    /// Once it has ended: the bytes written into guest memory.
    written: Option<u32>,
}

struct Waiting {
    number: u64,
    /// None: it was not read yet.
    parsed: Option<Parsed>,
}

struct Parsed {
    guest: Guest,
    request: Request,
    status: Gpa,
}

/// Where the descriptors are, with all three parts of the queue pinned.
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
            waiting: VecDeque::new(),
            buffers: Buffers::default(),
            patience: Default::default(),
            table: None,
            must_signal: true,
            broken: false,
        })
    }

    pub(crate) fn wake(&self) -> &Arc<OwnedFd> {
        &self.wake
    }

    /// Nothing that was taken from the queue is still to be answered.
    pub(crate) fn is_idle(&self) -> bool {
        self.order.is_empty()
    }

    /// The queue was stopped; it may come back as another.
    pub(crate) fn stopped(&mut self) {
        (self.table, self.must_signal, self.broken) = (None, true, false);
    }

    /// Does what there is to do, and what comes soon after. Waits for nothing else but what
    /// the observer and the DMA have to do first.
    pub(crate) fn serve(&mut self, vring: &VringMutex) {
        let end = Instant::now() + TURN;
        loop {
            if self.round(vring) {
                // Not at once: an event that ends this thread gets its turn.
                return wake_up(&self.wake);
            }
            if !self.look(vring) || Instant::now() >= end {
                return;
            }
        }
    }

    /// Whether it has to come again.
    fn round(&mut self, vring: &VringMutex) -> bool {
        let mut count = [0; 8];
        // Nothing to read: somebody else's event has brought us here.
        let _ = rustix::io::read(&self.wake, &mut count);
        self.reap();
        let more = self.take(vring);
        self.begin_waiting();
        if let Some(Err(error)) = self.ring.as_mut().map(Ring::submit) {
            tracing::error!("{}: io_uring: {error}", self.disk.image.path().display());
        }
        self.publish(vring);
        // Whoever waits for a buffer begins once these are free.
        let more = more || self.buffers.is_exhausted();
        self.buffers.teach(&self.disk);
        more
    }

    /// Looks for a while whether the disk answers, or the driver asks for something.
    fn look(&mut self, vring: &VringMutex) -> bool {
        let [answer, question] = &mut self.patience;
        match &mut self.ring {
            Some(ring) if !self.jobs.is_empty() => answer.look(|| ring.has_ended()),
            // Rings that are not pinned may be elsewhere.
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

    /// Takes what is available; whether there is more by now.
    fn take(&mut self, vring: &VringMutex) -> bool {
        let mut state = vring.get_mut();
        if self.broken || !state.get_queue().ready() {
            return false;
        }
        let memory = self.memory.memory();
        let queue = state.get_queue_mut();
        if self.table.is_none() && !self.pin_rings(queue) {
            return false;
        }
        let room = usize::from(queue.size()).saturating_sub(self.order.len());
        // Who waits already is woken when something ends; the driver has more in
        // the queue than it has room for, or we have not enough.
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
        // Section 2.7: sizes of the three parts, event indices included.
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
                self.give_up(&fault.to_string());
                false
            }
        }
    }

    fn guest(&self) -> Guest {
        let Disk { dma, counters, .. } = &*self.disk;
        Guest::new(self.memory.memory().into_inner(), dma.clone(), counters.dma_faults.clone())
    }

    fn give_up(&mut self, why: &str) {
        tracing::warn!("{}: a queue makes no sense: {why}", self.disk.image.path().display());
        self.broken = true;
    }

    /// Begins what can begin, in order: what must wait holds up those behind it, or
    /// else it might wait for ever.
    fn begin_waiting(&mut self) {
        while let Some(Waiting { number, parsed }) = self.waiting.pop_front() {
            let parsed = match parsed {
                Some(parsed) => parsed,
                None => match self.parse(number) {
                    Some(parsed) => parsed,
                    None => continue,
                },
            };
            if let Some(parsed) = self.begin(number, parsed) {
                self.waiting.push_front(Waiting { number, parsed: Some(parsed) });
                return;
            }
        }
    }

    /// Reads a request; one that is none has ended then.
    fn parse(&mut self, number: u64) -> Option<Parsed> {
        let (head, guest) = (self.slot(number)?.head, self.guest());
        let chain = match &self.table {
            Some(table) => walk(&guest, table.gpa, table.size, head),
            None => Ok(Chain::default()),
        };
        let chain = chain.unwrap_or_else(|malformed| {
            tracing::debug!("{malformed}");
            Chain::default()
        });
        let Some(status) = request::status_byte(&chain) else {
            // There is not even room to say so.
            self.end(number, 0, Status::IoError);
            return None;
        };
        match request::parse(&guest, &chain, self.disk.limits()) {
            Ok(request) => Some(Parsed { guest, request, status }),
            Err(refusal) => {
                let written = tell(&guest, status, refusal);
                self.end(number, written, refusal);
                None
            }
        }
    }

    /// Gives the request back where it must wait.
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

    /// Takes steps until one runs beside us, or the request is over.
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
                (Step::Over(status, data_bytes), _) => {
                    let written = tell(job.guest(), job.status(), status);
                    // Its frames are free before the driver hears of it.
                    drop(job);
                    self.end(number, written.saturating_add(data_bytes), status);
                    return;
                }
            }
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

    fn end(&mut self, number: u64, written: u32, status: Status) {
        if status != Status::Ok {
            add(&self.disk.counters.failed, 1);
        }
        if let Some(slot) = self.slot(number) {
            slot.written = Some(written);
        }
    }

    /// Tells the driver of what has ended, as far as all before it has.
    fn publish(&mut self, vring: &VringMutex) {
        if self.kept.is_broken() {
            // What was read or written there is worth nothing. The front end is let go.
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
        // Before the jobs go, and with them the pins: the kernel may still write.
        self.ring = None;
    }
}

/// Writes the status; how many bytes that were.
fn tell(guest: &Guest, at: Gpa, status: Status) -> u32 {
    match guest.write(vec![Segment { gpa: at, bytes: 1 }], &[status as u8]) {
        Ok(()) => 1,
        Err(fault) => {
            tracing::debug!("a status cannot be told: {fault}");
            0
        }
    }
}
