//! First touches that wait until there is room: nobody is to take more memory while none of it
//! can be evicted. What comes back from where it is does not wait: another page may have its place.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_sys::uffd::Fault;
use ebb_units::FrameRange;

use crate::pager::Pager;

/// Who waits, and for what.
pub(crate) struct Halt {
    /// With more than this taken, first touches wait; `u64::MAX`: they do not.
    above_bytes: AtomicU64,
    /// So many faults were left to wait since all were last woken.
    waiting: Mutex<u64>,
}

impl Halt {
    pub(crate) fn new() -> Halt {
        Halt { above_bytes: AtomicU64::new(u64::MAX), waiting: Mutex::new(0) }
    }

    fn waiting(&self) -> MutexGuard<'_, u64> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pager {
    /// With more than so much taken, first touches wait from now on; those that wait and need
    /// not any more are woken. `u64::MAX`: nobody waits.
    pub fn halt_above(&self, bytes: u64) {
        self.halt.above_bytes.store(bytes, Release);
        if self.is_halted() {
            return;
        }
        let mut waiting = self.halt.waiting();
        if *waiting > 0 {
            *waiting = 0;
            drop(waiting);
            // Each touches its frame again, and may come to wait again.
            self.report("wake", self.wake_all());
        }
    }

    /// What [`Pager::halt_above`] was told last.
    pub fn halts_above(&self) -> u64 {
        self.halt.above_bytes.load(Acquire)
    }

    /// How many touches wait for room.
    pub fn waiting_touches(&self) -> u64 {
        *self.halt.waiting()
    }

    /// Whether more is taken than first touches may have.
    fn is_halted(&self) -> bool {
        let above = self.halt.above_bytes.load(Acquire);
        above != u64::MAX && self.taken_bytes().is_ok_and(|taken| taken > above)
    }

    /// Leaves a first touch to wait; `false`: it is to be served.
    pub(crate) fn leave_waiting(&self, fault: Fault) -> bool {
        let Some(gfn) = self.ram.gpa(fault.address).map(|gpa| gpa.gfn()) else { return false };
        // It may have come as another one's neighbour since it was touched.
        let is_there = || !self.ram.is_hole(FrameRange::new(gfn, 1)).unwrap_or(false);
        if fault.write_protected || self.ledger.content(gfn).is_elsewhere() || is_there() {
            return false;
        }
        // Looked at with the count locked: who ends the wait after this finds it counted.
        let mut waiting = self.halt.waiting();
        let waits = self.is_halted();
        *waiting += u64::from(waits);
        waits
    }

    /// Whether first touches may have to wait.
    pub(crate) fn may_halt(&self) -> bool {
        self.halt.above_bytes.load(Relaxed) != u64::MAX
    }
}
