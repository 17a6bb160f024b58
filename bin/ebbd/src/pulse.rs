//! Whether the kernel whose word is taken still runs, asked again and again meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_inspect::Guest;
use ebb_pager::Pager;
use ebb_vm::Qmp;

use crate::insight::{self, Insight};
use crate::trust::was_reset;

/// An answer of QEMU's on its vCPUs is as good as one of now for so long. It costs the guest a
/// stop of each, so it is not asked for at every batch; RESET events are read every time.
const FRESH: Duration = Duration::from_millis(10);

/// Of one VM, for one pass.
pub struct Pulse {
    /// The trusted guest, if there is one.
    guest: Option<Arc<Guest>>,
    pager: Arc<Pager>,
    qmp: Option<Qmp>,
    asked: Instant,
    ended: Option<End>,
}

/// Why it does not run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// QEMU told of a reset.
    Reset,
    /// A vCPU runs something else, or nobody tells.
    Unknown,
}

impl Pulse {
    /// Of the guest that `insight` was sure of last.
    pub fn new(
        insight: &Insight,
        guest: Option<Arc<Guest>>,
        pager: Arc<Pager>,
        qmp: Option<Qmp>,
    ) -> Pulse {
        Pulse { guest, pager, qmp, asked: insight.confirmed(), ended: None }
    }

    /// Whether it still runs; once it does not, never again.
    pub fn beats(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.look();
        }
        self.ended.is_none()
    }

    /// Whether nothing was told of a reset. It does not wait for QEMU, which may wait for what
    /// the caller holds.
    pub fn hears_no_reset(&mut self) -> bool {
        if self.ended.is_none() && was_reset(&mut self.qmp) {
            self.ended = Some(End::Reset);
        }
        self.ended.is_none() && self.qmp.is_some()
    }

    /// Whether nothing was heard so far that ends it.
    pub fn is_sound(&self) -> bool {
        self.ended.is_none() && self.qmp.is_some()
    }

    fn look(&mut self) -> Option<End> {
        if was_reset(&mut self.qmp) {
            return Some(End::Reset);
        }
        if self.qmp.is_some() && self.asked.elapsed() < FRESH {
            return None;
        }
        let (asked, view) = (Instant::now(), self.pager.view());
        let runs = |guest| insight::is_running(guest, &view, self.qmp.as_mut()) == Ok(true);
        if !self.guest.as_deref().is_some_and(runs) {
            return Some(End::Unknown);
        }
        self.asked = asked;
        None
    }

    /// The socket, and why the guest does not run any more, if that was seen.
    pub fn end(self) -> (Option<Qmp>, Option<End>) {
        (self.qmp, self.ended)
    }
}
