//! The rings of a queue: what is taken from the available ring, and what goes into the used ring.

use ebb_units::Gpa;
use ebb_vhost::{Access, Segment};
use vhost_user_backend::{VringMutex, VringT};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestAddressSpace;

use super::{Slot, Table, Waiting, Worker};

impl Worker {
    /// Takes requests from the available ring. The driver does not tell of further ones until
    /// [`Worker::listen`]: while the queue is served, that would only cost it time.
    pub(super) fn take(&mut self, vring: &VringMutex) {
        let mut state = vring.get_mut();
        // Not each event that wakes this thread comes from a front end that has enabled the queue.
        if self.broken || !state.get_queue().ready() || !state.is_enabled() {
            return;
        }
        let memory = self.memory.memory();
        let queue = state.get_queue_mut();
        if self.table.is_none() && (self.stalled || !self.pin_rings(queue)) {
            return;
        }
        let room = usize::from(queue.size()).saturating_sub(self.order.len());
        // Requests that wait are woken when another ends. No room means that the driver made more
        // available than the queue has room for.
        if room == 0 || !self.waiting.is_empty() {
            return;
        }
        if queue.disable_notification(&*memory).is_err() {
            return self.give_up("its used ring is in no memory");
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
            Err(error) => self.give_up(&error.to_string()),
        }
    }

    /// Has the driver tell of the requests that it makes available from now on. Whether there are
    /// some already. Where none are taken now, the queue is served again once they can be.
    pub(super) fn listen(&self, vring: &VringMutex) -> bool {
        if !self.may_take() {
            return false;
        }
        let memory = self.memory.memory();
        let mut state = vring.get_mut();
        let enabled = state.is_enabled();
        let queue = state.get_queue_mut();
        enabled && queue.ready() && queue.enable_notification(&*memory).unwrap_or(false)
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

    /// Tells the driver of each request that has ended, if all before it have too.
    pub(super) fn publish(&mut self, vring: &VringMutex) {
        if self.kept.is_broken() {
            // What was read or written there is void. The front end is disconnected.
            self.broken = true;
            return;
        }
        // Rings that are not pinned may be non-resident, and nothing taken from them is left.
        if self.table.is_none() {
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
