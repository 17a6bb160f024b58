//! Whether the trusted kernel still runs, asked again and again in the middle of a pass.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_inspect::Guest;
use ebb_pager::Pager;
use ebb_vm::Qmp;

use super::insight::{self, KnownGuest};
use super::qmp_link::QmpLink;
use super::reaching::Reaching;
use crate::support::open_files::Descriptors;

/// An answer of QEMU's on its vCPUs is as good as one of now for so long. It costs the guest a
/// stop of each, so it is not asked for at every batch; RESET events are read every time.
const FRESH: Duration = Duration::from_millis(10);
/// A vCPU may wait for a frame that the caller holds, and QEMU for the vCPU: so long they
/// may wait for each other, about as long as frames are held anyway.
const HURRY: Duration = Duration::from_millis(10);

/// The check of one VM for one pass. It has the VM's control socket until it is dropped.
pub struct Liveness<'a> {
    qmp: &'a mut QmpLink,
    /// The trusted guest, if there is one.
    guest: Option<Arc<Guest>>,
    pager: Arc<Pager>,
    asked: Instant,
    ended: Option<End>,
    /// QEMU did not answer in time.
    is_silent: bool,
    /// QEMU's descriptors when it told its devices.
    seen: Option<Arc<Descriptors>>,
}

/// Why the trusted kernel does not run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// QEMU told of a reset.
    Reset,
    /// A vCPU runs something else, or nobody tells.
    Unknown,
}

impl<'a> Liveness<'a> {
    /// Of the guest that was trusted last, beside the devices that were seen last.
    pub fn new(
        qmp: &'a mut QmpLink,
        guest: &KnownGuest,
        reaching: &Reaching,
        pager: &Arc<Pager>,
    ) -> Liveness<'a> {
        Liveness {
            qmp,
            guest: guest.witness().cloned(),
            pager: Arc::clone(pager),
            asked: guest.confirmed(),
            ended: None,
            is_silent: false,
            seen: reaching.seen.clone(),
        }
    }

    /// Whether no device can have come that reaches the memory by itself.
    fn is_as_seen(&self) -> bool {
        self.seen.as_ref().is_some_and(|seen| seen.holds())
    }

    /// Whether it still runs; once it does not, never again. It waits for QEMU: the caller
    /// holds no frame.
    pub fn runs(&mut self) -> bool {
        if self.ended.is_none() && !self.hears_reset() && !self.is_fresh() {
            let asked = Instant::now();
            match self.qmp.socket().is_some_and(|qmp| runs(&self.guest, &self.pager, qmp)) {
                true => self.asked = asked,
                false => self.ended = Some(End::Unknown),
            }
        }
        self.ended.is_none() && self.is_as_seen()
    }

    /// The same for a caller that holds frames: where QEMU does not answer at once, nobody knows,
    /// and it is not asked again.
    pub fn runs_at_once(&mut self) -> bool {
        if self.ended.is_none() && !self.is_silent && !self.hears_reset() && !self.is_fresh() {
            let (asked, guest, pager) = (Instant::now(), &self.guest, &self.pager);
            let answer =
                self.qmp.socket().map(|qmp| qmp.in_a_hurry(HURRY, |qmp| runs(guest, pager, qmp)));
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
        self.ended.is_none() && !self.hears_reset() && self.qmp.is_connected()
    }

    /// Whether nothing was heard so far that ends it.
    pub fn is_sound(&self) -> bool {
        self.ended.is_none() && self.qmp.is_connected()
    }

    /// Why the kernel does not run any more, if that was seen.
    pub fn ended(&self) -> Option<End> {
        self.ended
    }

    fn hears_reset(&mut self) -> bool {
        let was_reset = self.qmp.hears_reset();
        if was_reset {
            self.ended = Some(End::Reset);
        }
        was_reset
    }

    fn is_fresh(&self) -> bool {
        self.qmp.is_connected() && self.asked.elapsed() < FRESH
    }
}

fn runs(guest: &Option<Arc<Guest>>, pager: &Pager, qmp: &mut Qmp) -> bool {
    let runs = |guest| insight::is_running(guest, &pager.view(), Some(qmp)) == Ok(true);
    guest.as_deref().is_some_and(runs)
}
