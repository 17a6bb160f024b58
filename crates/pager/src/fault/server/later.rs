//! Faults that are served later: by a refill thread, or once their frame can be brought back.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use ebb_sys::uffd::Fault;
use ebb_units::Gfn;

use super::FaultServer;
use super::failure::FORGOTTEN;
use super::jobs::{Job, PAUSE};
use crate::frames::errors::is_vmm_ended;

impl FaultServer {
    /// Leaves the fault to the refill threads; `false`: there are none, or too many faults wait for
    /// them already.
    pub(crate) fn refill_later(&self, fault: Fault, began: Instant) -> bool {
        self.jobs.give(Job { fault, began })
    }

    /// Has the touch of a frame that cannot be brought back wait, and ask again. `false`: this
    /// thread has waited instead, and the frame must be woken now.
    pub(crate) fn ask_again_later(&self, gfn: Gfn) -> bool {
        let later = self.jobs.wake_later(gfn);
        if !later {
            std::thread::sleep(PAUSE);
        }
        later
    }

    /// Returns why frames that the guest needs cannot be brought back; `None`: they can, or the
    /// guest has not touched one recently.
    pub fn failure(&self) -> Option<Arc<io::Error>> {
        let state = self.failure.state();
        let recent = state.last.as_ref().filter(|(_, at)| at.elapsed() < FORGOTTEN);
        recent.map(|(error, _)| Arc::clone(error))
    }

    /// Called when a frame's fault cannot be served. If a refill thread has read it (`may_wait`),
    /// it waits for a while, as the guest would otherwise ask without end; the thread goes on.
    /// `false`: the frame must be woken now.
    pub(crate) fn fault_failed(&self, gfn: Gfn, error: io::Error, may_wait: bool) -> bool {
        if is_vmm_ended(&error) {
            return false;
        }
        if let Some(line) = self.failure.note(error, Instant::now()) {
            tracing::error!("fault: {line}");
        }
        may_wait && self.ask_again_later(gfn)
    }
}
