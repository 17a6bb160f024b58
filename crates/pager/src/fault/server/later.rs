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
        self.failed().map(|(error, _)| error)
    }

    /// As [`FaultServer::failure`], with the last frame for which that was found.
    pub fn failed(&self) -> Option<(Arc<io::Error>, Gfn)> {
        let state = self.failure.state();
        let recent = state.last.as_ref().filter(|(.., at)| at.elapsed() < FORGOTTEN);
        recent.map(|(error, gfn, _)| (Arc::clone(error), *gfn))
    }

    /// Called when a frame's fault cannot be served. If a refill thread has read it (`may_wait`),
    /// it waits for a while, as the guest would otherwise ask without end; the thread goes on.
    /// `false`: the frame must be woken now.
    pub(crate) fn fault_failed(&self, gfn: Gfn, error: io::Error, may_wait: bool) -> bool {
        if is_vmm_ended(&error) {
            return false;
        }
        if let Some(line) = self.failure.note(gfn, error, Instant::now()) {
            let at = gfn.gpa().0;
            tracing::error!("fault: the frame at {at:#x} cannot be brought back: {line}");
        }
        may_wait && self.ask_again_later(gfn)
    }
}
