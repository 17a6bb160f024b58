//! Faults that are served later: by a refill thread, or once their frame can be brought back.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use ebb_sys::uffd::Fault;
use ebb_units::Gfn;

use super::FaultServer;
use super::failure::FORGOTTEN;
use super::jobs::{Job, PAUSE};
use crate::frames::errors::is_gone;

impl FaultServer {
    /// Leaves the fault to the refill threads; `false`: there are none, or too
    /// much waits for them already.
    pub(crate) fn refill_later(&self, fault: Fault, began: Instant) -> bool {
        self.jobs.give(Job { fault, began })
    }

    /// Has whoever touches a frame that cannot be brought back wait, and ask again. `false`: it is
    /// to be woken now, after this thread has waited.
    pub(crate) fn ask_again_later(&self, gfn: Gfn) -> bool {
        let later = self.jobs.wake_later(gfn);
        if !later {
            std::thread::sleep(PAUSE);
        }
        later
    }

    /// Why frames that the guest needs cannot be brought back; `None`: they can, or
    /// nobody asked of late.
    pub fn failure(&self) -> Option<Arc<io::Error>> {
        let state = self.failure.state();
        let recent = state.last.as_ref().filter(|(_, at)| at.elapsed() < FORGOTTEN);
        recent.map(|(error, _)| Arc::clone(error))
    }

    /// The fault of a frame cannot be served. One that a refill thread has read waits for a while,
    /// as the guest would ask without end; that thread goes on. `false`: the frame is to be woken now.
    pub(crate) fn fault_failed(&self, gfn: Gfn, error: io::Error, may_wait: bool) -> bool {
        if is_gone(&error) {
            return false;
        }
        if let Some(told) = self.failure.note(error, Instant::now()) {
            tracing::error!("fault: {told}");
        }
        may_wait && self.ask_again_later(gfn)
    }
}
