//! Whether the trusted kernel still runs, asked again and again in the middle of a pass.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_pager::Pager;
use ebb_vm::Qmp;

use super::insight::KnownGuest;
use super::kernel::Kernel;
use super::qmp_link::QmpLink;
use super::reaching::Reaching;
use crate::support::open_files::Descriptors;

/// How long QEMU's answer about its vCPUs counts as current. Asking stops each vCPU, so QEMU is not
/// asked at every batch. RESET events are read every time. Where they may come late, each answer
/// counts once.
const FRESH: Duration = Duration::from_millis(10);
/// How long a caller that has locked frames waits for QEMU. A vCPU may wait for such a frame, and
/// QEMU for the vCPU. This is about as long as frames stay locked anyway.
const HURRY: Duration = Duration::from_millis(10);

/// The liveness check of one VM for one pass. It has the VM's control socket until it is dropped.
pub struct Liveness<'a> {
    qmp: &'a mut QmpLink,
    /// The trusted kernel, if there is one.
    kernel: Option<Kernel>,
    pager: Arc<Pager>,
    asked: Instant,
    ended: Option<End>,
    /// Whether QEMU did not answer in time.
    is_silent: bool,
    /// QEMU's descriptors when it listed its devices.
    descriptors: Option<Arc<Descriptors>>,
}

/// Why the trusted kernel does not run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// QEMU reported a reset.
    Reset,
    /// A vCPU runs something else, the kernel has withdrawn its registration, or nobody tells.
    Unknown,
}

impl<'a> Liveness<'a> {
    /// Makes a check of the guest that was trusted last, beside the devices that were seen last.
    pub fn new(
        qmp: &'a mut QmpLink,
        guest: &KnownGuest,
        reaching: &Reaching,
        pager: &Arc<Pager>,
    ) -> Liveness<'a> {
        Liveness {
            qmp,
            kernel: guest.trusted_kernel().cloned(),
            pager: Arc::clone(pager),
            asked: guest.confirmed(),
            ended: None,
            is_silent: false,
            descriptors: reaching.descriptors.clone(),
        }
    }

    /// Whether no device that reaches the memory by itself can have come.
    fn is_unchanged(&self) -> bool {
        self.descriptors.as_ref().is_some_and(|seen| seen.holds())
    }

    /// Whether the kernel still runs. Once it does not, the answer stays "no". Waits for QEMU, so
    /// the caller must not have locked a frame.
    pub fn runs(&mut self) -> bool {
        if self.ended.is_none() && !self.sees_end() && !self.is_fresh() {
            let asked = Instant::now();
            let runs = self.qmp.socket().is_some_and(|qmp| runs(&self.kernel, &self.pager, qmp));
            // A reset that is reported late was read with the answer.
            match runs && !self.sees_end() {
                true => self.asked = asked,
                false => self.ended = self.ended.or(Some(End::Unknown)),
            }
        }
        self.ended.is_none() && self.is_unchanged()
    }

    /// Whether the kernel still runs, for a caller that has locked frames. If QEMU does not answer
    /// at once, the answer is "no", and QEMU is not asked again.
    pub fn runs_at_once(&mut self) -> bool {
        if self.ended.is_none() && !self.is_silent && !self.sees_end() && !self.is_fresh() {
            let (asked, kernel, pager) = (Instant::now(), &self.kernel, &self.pager);
            let answer =
                self.qmp.socket().map(|qmp| qmp.in_a_hurry(HURRY, |qmp| runs(kernel, pager, qmp)));
            match answer {
                // The question may have taken a while, and a reset that is reported late was read
                // with the answer.
                Some(true) if !self.sees_end() => self.asked = asked,
                Some(false) if asked.elapsed() >= HURRY => self.is_silent = true,
                _ => self.ended = self.ended.or(Some(End::Unknown)),
            }
        }
        self.ended.is_none() && !self.is_silent && self.is_unchanged()
    }

    /// Whether no reset was reported. Does not wait for QEMU, which may wait for frames that the
    /// caller has locked.
    pub fn hears_no_reset(&mut self) -> bool {
        self.ended.is_none() && !self.hears_reset() && self.qmp.is_connected()
    }

    /// Whether nothing was seen so far that ends the trust, and QEMU's socket is connected.
    pub fn is_sound(&self) -> bool {
        self.ended.is_none() && self.qmp.is_connected()
    }

    /// Returns why the kernel does not run any more, if that was seen.
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

    /// Whether a reset was reported, or the kernel has withdrawn what it had registered. Both are
    /// looked at every time.
    fn sees_end(&mut self) -> bool {
        self.sees_withdrawal() || self.hears_reset()
    }

    fn sees_withdrawal(&mut self) -> bool {
        let view = self.pager.view();
        let is_withdrawn = self.kernel.as_ref().is_some_and(|kernel| kernel.is_withdrawn(&view));
        if is_withdrawn {
            self.ended = Some(End::Unknown);
        }
        is_withdrawn
    }

    fn is_fresh(&self) -> bool {
        let is_told = self.qmp.is_connected() && self.qmp.hears_at_once();
        is_told && self.asked.elapsed() < FRESH
    }
}

fn runs(kernel: &Option<Kernel>, pager: &Pager, qmp: &mut Qmp) -> bool {
    let runs = |kernel: &Kernel| kernel.is_running(&pager.view(), Some(qmp)) == Ok(true);
    kernel.as_ref().is_some_and(runs)
}
