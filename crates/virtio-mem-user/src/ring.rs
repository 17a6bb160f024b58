//! The request queue: virtio 1.2, sections 2.7 and 5.15.6.
//!
//! Requests are answered one after the other, so the used index alone tells the next process which
//! request is next.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use ebb_units::Gpa;
use ebb_vhost::{
    Access, DESCRIPTORS_MAX, DmaFault, Guest, Malformed, Pinned, Segment, bytes_of, slice, walk,
};
use ebb_virtio_mem::{Device, REQUEST_BYTES, RESPONSE_BYTES, Stopped};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

/// Most attempts to write an answer. The answer's place is pinned, so whoever locks its frame
/// releases it at once.
const TELL_TRIES: u32 = 1000;

/// When the queue should be served again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// At the next kick.
    Asked,
    /// At once: there is more.
    Now,
    /// After a while: memory that it needs cannot be had now.
    Later,
}

/// Why a request is not answered.
enum Unanswered {
    /// The request cannot be answered now, and stays in the queue.
    NotNow,
    /// The queue is not served any more.
    Never(String),
}

impl From<Stopped> for Unanswered {
    fn from(stopped: Stopped) -> Unanswered {
        Unanswered::Never(stopped.to_string())
    }
}

/// Addresses of a queue's three parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Places {
    pub(crate) descriptors: Gpa,
    pub(crate) available: Gpa,
    pub(crate) used: Gpa,
}

/// The queue with its kick and its call.
pub(crate) struct Ring {
    queue: Queue,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    enabled: bool,
    /// Pins all three parts, from the first time that this queue is served.
    pinned: Option<Pinned>,
    /// Whether to signal at the next serving: a process before this one may have ended without
    /// signalling.
    must_signal: bool,
    /// Whether the queue is invalid, or the device has stopped. Then nothing more is taken from the
    /// queue until it is set up again.
    broken: bool,
}

impl Ring {
    pub(crate) fn new() -> Ring {
        Ring {
            // The only error is a size that is no power of two.
            queue: Queue::new(DESCRIPTORS_MAX as u16).unwrap_or_default(),
            kick: None,
            call: None,
            enabled: false,
            pinned: None,
            must_signal: true,
            broken: false,
        }
    }

    /// Sets the queue's size. Returns `None` if no queue can have it.
    pub(crate) fn set_size(&mut self, size: u32) -> Option<()> {
        self.queue.try_set_size(u16::try_from(size).ok()?).ok()
    }

    /// Sets the places of the queue's parts. Returns `None` if they are not aligned.
    pub(crate) fn set_places(&mut self, places: Places) -> Option<()> {
        let Places { descriptors, available, used } = places;
        self.queue.try_set_desc_table_address(GuestAddress(descriptors.0)).ok()?;
        self.queue.try_set_avail_ring_address(GuestAddress(available.0)).ok()?;
        self.queue.try_set_used_ring_address(GuestAddress(used.0)).ok()?;
        self.pinned = None;
        Some(())
    }

    /// Sets where the queue stood. The used ring takes precedence, once it is read.
    pub(crate) fn set_base(&mut self, base: u32) {
        self.queue.set_next_used(base as u16);
        self.queue.set_next_avail(base as u16);
    }

    /// Starts the queue: a kick does that (vhost-user protocol, "Ring states").
    pub(crate) fn start(&mut self, kick: OwnedFd) {
        self.stop();
        self.kick = Some(kick);
        self.queue.set_ready(true);
    }

    pub(crate) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
        // The new listener has not seen any earlier signal.
        self.must_signal = true;
    }

    pub(crate) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    /// Stops the queue. Returns where it stands: the index of the first request that was not
    /// answered.
    pub(crate) fn stop(&mut self) -> u16 {
        self.queue.set_ready(false);
        (self.kick, self.pinned, self.must_signal, self.broken) = (None, None, true, false);
        self.queue.next_used()
    }

    /// Drops the pins: the guest's memory table is a new one.
    pub(crate) fn moved(&mut self) {
        self.pinned = None;
    }

    /// Returns the descriptor that is readable when there are requests, or `None` if the queue does
    /// not run.
    pub(crate) fn kick(&self) -> Option<&OwnedFd> {
        self.kick.as_ref().filter(|_| self.runs())
    }

    fn runs(&self) -> bool {
        self.queue.ready() && self.enabled && !self.broken
    }

    /// Answers the available requests.
    pub(crate) fn serve(&mut self, guest: &Guest, device: &Device) -> Next {
        if !self.runs() {
            return Next::Asked;
        }
        let begun = if self.pinned.is_none() { self.begin(guest) } else { Ok(()) };
        match begun.and_then(|()| self.answer_all(guest, device)) {
            Ok(true) => Next::Now,
            Ok(false) => Next::Asked,
            Err(Unanswered::NotNow) => Next::Later,
            Err(Unanswered::Never(why)) => {
                self.give_up(&why);
                Next::Asked
            }
        }
    }

    /// Pins the queue, and continues after the last answered request. The used ring tells which one
    /// that is, whoever answered it. The front end may believe otherwise: it may not know of an
    /// answer from before this process.
    fn begin(&mut self, guest: &Guest) -> Result<(), Unanswered> {
        let (size, count) = (self.queue.size(), u32::from(self.queue.size()));
        let segment = |gpa, bytes| Segment { gpa: Gpa(gpa), bytes };
        // Section 2.7 gives the sizes of the three parts, event indices included.
        let parts = vec![
            segment(self.queue.desc_table(), 16 * u32::from(size)),
            segment(self.queue.avail_ring(), 6 + 2 * count),
            segment(self.queue.used_ring(), 6 + 8 * count),
        ];
        match guest.pin(parts, Access::Keep) {
            Ok(pinned) => self.pinned = Some(pinned),
            Err(DmaFault::NotNow(_)) => return Err(Unanswered::NotNow),
            Err(fault) => return Err(Unanswered::Never(fault.to_string())),
        }
        let used = self.queue.used_idx(&*guest.memory(), Ordering::Acquire);
        let used = used.map_err(|error| Unanswered::Never(error.to_string()))?;
        self.queue.set_next_used(used.0);
        self.queue.set_next_avail(used.0);
        Ok(())
    }

    /// Answers at most as many requests as the queue can have at once, so that other events get
    /// their turn. Returns whether there are more.
    fn answer_all(&mut self, guest: &Guest, device: &Device) -> Result<bool, Unanswered> {
        let memory = guest.memory();
        let memory: &GuestMemoryMmap = &memory;
        let failed = |error: virtio_queue::Error| Unanswered::Never(error.to_string());
        self.queue.disable_notification(memory).map_err(failed)?;
        let (mut any, mut unanswered) = (self.must_signal, None);
        for _ in 0..self.queue.size() {
            let next = self.queue.iter(memory).map_err(failed)?.next();
            let Some(head) = next.map(|chain| chain.head_index()) else { break };
            match self.answer(guest, device, head) {
                Ok(written) => self.queue.add_used(memory, head, written).map_err(failed)?,
                Err(why) => {
                    let undone = self.queue.next_avail().wrapping_sub(1);
                    self.queue.set_next_avail(undone);
                    unanswered = Some(why);
                    break;
                }
            }
            any = true;
        }
        if any {
            self.signal();
        }
        match unanswered {
            Some(why) => Err(why),
            None => self.queue.enable_notification(memory).map_err(failed),
        }
    }

    /// Answers one request. Returns how many bytes were written. A chain without room for an answer
    /// is no request, and nothing is done.
    fn answer(&self, guest: &Guest, device: &Device, head: u16) -> Result<u32, Unanswered> {
        let table = Gpa(self.queue.desc_table());
        let chain = match walk(guest, table, self.queue.size(), head) {
            Ok(chain) => chain,
            Err(Malformed::Memory(DmaFault::NotNow(_))) => return Err(Unanswered::NotNow),
            Err(malformed) => {
                tracing::debug!("virtio-mem: {malformed}");
                return Ok(0);
            }
        };
        let place = slice(&chain.writable, 0, RESPONSE_BYTES as u64);
        let sent = slice(&chain.readable, 0, REQUEST_BYTES as u64);
        let mut request = vec![0; bytes_of(&sent) as usize];
        if bytes_of(&place) < RESPONSE_BYTES as u64 {
            return Ok(0);
        }
        // Reading and pinning come before the change, because the answer must be writable
        // afterwards.
        let read = guest.read(sent, &mut request);
        let _pinned = match read.and_then(|()| guest.pin(place.clone(), Access::Keep)) {
            Ok(pinned) => pinned,
            Err(DmaFault::NotNow(_)) => return Err(Unanswered::NotNow),
            Err(DmaFault::Forbidden(_)) => return Ok(0),
        };
        let response = device.handle(&request)?;
        for _ in 0..TELL_TRIES {
            match guest.write(place.clone(), &response) {
                Ok(()) => return Ok(RESPONSE_BYTES as u32),
                // The request has unplugged the place of the answer.
                Err(DmaFault::Forbidden(_)) => return Ok(0),
                // The request must not be done again.
                Err(DmaFault::NotNow(_)) => std::thread::yield_now(),
            }
        }
        Err(Unanswered::Never("an answer cannot be written".into()))
    }

    fn signal(&mut self) {
        let Some(call) = &self.call else { return };
        // A full counter is a signal already, so do not wait for it.
        let mut room = [PollFd::new(call, PollFlags::OUT)];
        if poll(&mut room, Some(&Timespec::default())) != Ok(0)
            && let Err(error) = rustix::io::write(call, &1u64.to_ne_bytes())
        {
            tracing::debug!("virtio-mem: a signal cannot be sent: {error}");
        }
        self.must_signal = false;
    }

    fn give_up(&mut self, why: &str) {
        tracing::warn!("virtio-mem: the request queue is not served any more: {why}");
        self.broken = true;
    }
}
