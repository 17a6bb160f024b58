//! Whether the kernel whose word is taken still runs, asked again and again meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_inspect::Guest;
use ebb_pager::Pager;
use ebb_vm::Qmp;

use crate::devices::Seen;
use crate::insight::{self, Insight};
use crate::trust::was_reset;

/// An answer of QEMU's on its vCPUs is as good as one of now for so long. It costs the guest a
/// stop of each, so it is not asked for at every batch; RESET events are read every time.
const FRESH: Duration = Duration::from_millis(10);
/// A vCPU may wait for a frame that the caller holds, and QEMU for the vCPU: so long they
/// may wait for each other, about as long as frames are held anyway.
const HURRY: Duration = Duration::from_millis(10);

/// Of one VM, for one pass.
pub struct Pulse {
    /// The trusted guest, if there is one.
    guest: Option<Arc<Guest>>,
    pager: Arc<Pager>,
    qmp: Option<Qmp>,
    asked: Instant,
    ended: Option<End>,
    /// QEMU did not answer in time.
    is_silent: bool,
    /// Its descriptors when it told its devices.
    seen: Option<Arc<Seen>>,
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
        seen: Option<Arc<Seen>>,
    ) -> Pulse {
        let asked = insight.confirmed();
        Pulse { guest, pager, qmp, asked, ended: None, is_silent: false, seen }
    }

    /// Whether no device can have come that reaches the memory by itself.
    fn is_as_seen(&self) -> bool {
        self.seen.as_ref().is_some_and(|seen| seen.holds())
    }

    /// Whether it still runs; once it does not, never again. It waits for QEMU: the caller
    /// holds nothing.
    pub fn beats(&mut self) -> bool {
        if self.ended.is_none() && !self.was_reset() && !self.is_fresh() {
            let asked = Instant::now();
            match self.qmp.as_mut().is_some_and(|qmp| runs(&self.guest, &self.pager, qmp)) {
                true => self.asked = asked,
                false => self.ended = Some(End::Unknown),
            }
        }
        self.ended.is_none() && self.is_as_seen()
    }

    /// The same for who holds frames: where QEMU does not answer at once, nobody knows, and
    /// it is not asked again.
    pub fn beats_at_once(&mut self) -> bool {
        if self.ended.is_none() && !self.is_silent && !self.was_reset() && !self.is_fresh() {
            let (asked, guest, pager) = (Instant::now(), &self.guest, &self.pager);
            let answer =
                self.qmp.as_mut().map(|qmp| qmp.in_a_hurry(HURRY, |qmp| runs(guest, pager, qmp)));
            match answer {
                Some(true) => self.asked = asked,
                Some(false) if asked.elapsed() >= HURRY => self.is_silent = true,
                _ => self.ended = Some(End::Unknown),
            }
        }
        self.ended.is_none() && !self.is_silent && self.is_as_seen()
    }

    /// Whether nothing was told of a reset. It does not wait for QEMU, which may wait for what
    /// the caller holds.
    pub fn hears_no_reset(&mut self) -> bool {
        self.ended.is_none() && !self.was_reset() && self.qmp.is_some()
    }

    /// Whether nothing was heard so far that ends it.
    pub fn is_sound(&self) -> bool {
        self.ended.is_none() && self.qmp.is_some()
    }

    fn was_reset(&mut self) -> bool {
        let reset = was_reset(&mut self.qmp);
        if reset {
            self.ended = Some(End::Reset);
        }
        reset
    }

    fn is_fresh(&self) -> bool {
        self.qmp.is_some() && self.asked.elapsed() < FRESH
    }

    /// The socket, and why the guest does not run any more, if that was seen.
    pub fn end(self) -> (Option<Qmp>, Option<End>) {
        (self.qmp, self.ended)
    }
}

fn runs(guest: &Option<Arc<Guest>>, pager: &Pager, qmp: &mut Qmp) -> bool {
    let runs = |guest| insight::is_running(guest, &pager.view(), Some(qmp)) == Ok(true);
    guest.as_deref().is_some_and(runs)
}
