//! Keeps disturbances away from VMs that are being started: a start that is refused tells nothing.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Any number of starts at once, or any number of disturbances.
#[derive(Default)]
pub struct Gate {
    counts: Mutex<Counts>,
    moved: Condvar,
}

#[derive(Default)]
struct Counts {
    starts: u32,
    waiting: u32,
    disturbances: u32,
}

/// A start, until it is dropped.
pub struct Start<'a>(&'a Gate);

/// A disturbance, until it is dropped.
pub struct Disturbance<'a>(&'a Gate);

impl Gate {
    /// Waits until nothing is disturbed any more. Nobody disturbs anything from then on.
    pub fn start(&self) -> Start<'_> {
        let mut counts = self.counts();
        counts.waiting += 1;
        while counts.disturbances > 0 {
            // A thread that panics wakes nobody.
            let some = Duration::from_millis(100);
            let waited = self.moved.wait_timeout(counts, some);
            counts = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        counts.waiting -= 1;
        counts.starts += 1;
        Start(self)
    }

    /// Begins a disturbance; none: a VM is being started, or is about to be.
    pub fn disturb(&self) -> Option<Disturbance<'_>> {
        let mut counts = self.counts();
        if counts.starts + counts.waiting > 0 {
            return None;
        }
        counts.disturbances += 1;
        Some(Disturbance(self))
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Start<'_> {
    fn drop(&mut self) {
        self.0.counts().starts -= 1;
    }
}

impl Drop for Disturbance<'_> {
    fn drop(&mut self) {
        self.0.counts().disturbances -= 1;
        self.0.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_disturbed_while_a_vm_starts() {
        let gate = Gate::default();
        let (one, other) = (gate.disturb(), gate.disturb());
        assert!(one.is_some() && other.is_some());
        std::thread::scope(|scope| {
            let starting = scope.spawn(|| drop(gate.start()));
            crate::until("it to wait", || gate.disturb().is_none().then_some(()));
            assert!(!starting.is_finished());
            drop((one, other));
            starting.join().expect("it starts");
        });
        let start = gate.start();
        assert!(gate.disturb().is_none());
        drop(start);
        assert!(gate.disturb().is_some());
    }
}
