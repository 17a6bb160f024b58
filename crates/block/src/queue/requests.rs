//! The requests that were taken from a queue, from reading them to their end.

use ebb_vhost::{DmaFault, Malformed, walk};

use super::{Parsed, Slot, Waiting, Worker};
use crate::counters::add;
use crate::job::{Job, Step};
use crate::request::{self, Halted, Status, StatusByte};

/// Why there is no request to begin.
enum Unread {
    /// It has ended.
    Ended,
    /// It cannot be read now, or never. If never, the queue is broken.
    Waits,
}

impl Worker {
    /// Begins requests in order. One that must wait holds up those behind it, or else it might
    /// wait for ever.
    pub(super) fn begin_waiting(&mut self) {
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
    pub(super) fn go_on_later(&mut self) {
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

    pub(super) fn reap(&mut self) {
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
            self.give_up("a request's status cannot be written");
        } else if let Some(slot) = self.slot(number) {
            debug_assert!(slot.written.is_none(), "request {number} ends twice");
            slot.written = Some(data_bytes.saturating_add(1));
        }
    }
}
