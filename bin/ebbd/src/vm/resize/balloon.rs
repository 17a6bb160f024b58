//! The controller of a VM's balloon: what the balloon was told to hold, and when it is emptied.

use ebb_api::BalloonStatus;
use ebb_policy::resize::{Driver, SizeParts};
use ebb_vm::qmp::QmpError;
use ebb_vm::{Qmp, balloon};

use super::reported::now_s;
use crate::vm::context::VmContext;
use crate::vm::context::capabilities::Capabilities;

/// Figures older than this, in seconds, do not tell whether the guest is under pressure now.
const PRESSURE_AGE_S: u64 = 5;
/// Memory that Linux takes out of its balloon at once before it kills a process.
const OOM_PIECE_BYTES: u64 = 1 << 20;

/// The controller of one VM's balloon.
#[derive(Default)]
pub(super) struct BalloonControl {
    /// What the balloon was last told to hold, in bytes.
    asked_bytes: Option<u64>,
    /// The most that the balloon has held since it was last told, in bytes.
    most_bytes: u64,
    /// How often the balloon was emptied because the guest needed that.
    releases: u64,
    /// Seconds between two figures that the guest was asked for.
    polled_s: Option<u64>,
}

impl BalloonControl {
    /// Has the guest tell its figures every `wanted_s` seconds, if it drives its balloon.
    pub(super) fn poll(
        &mut self,
        qmp: &mut Qmp,
        found: &Capabilities,
        wanted_s: u64,
    ) -> Result<(), QmpError> {
        let ready = found.balloon_part().is_some_and(|balloon| balloon.driver != Driver::Absent);
        if let Some(balloon) = found.balloon.as_ref().filter(|_| ready)
            && self.polled_s != Some(wanted_s)
        {
            balloon::poll_stats(qmp, balloon, wanted_s)?;
            self.polled_s = Some(wanted_s);
        }
        Ok(())
    }

    /// Whether the guest is about to run out of memory: it says so, or it has taken some out of its
    /// balloon by itself.
    pub(super) fn is_pressed(&mut self, cx: &VmContext, parts: &SizeParts) -> bool {
        let held = parts.ballooned_bytes();
        self.most_bytes = self.most_bytes.max(held);
        let asked = self.asked_bytes.unwrap_or(0);
        let deflated = self.most_bytes <= asked && held + OOM_PIECE_BYTES <= self.most_bytes;
        let since_s = now_s().saturating_sub(PRESSURE_AGE_S);
        let figures = cx.capabilities.as_ref().and_then(|found| found.figures(since_s));
        deflated || figures.is_some_and(|figures| figures.is_pressed())
    }

    /// Has the balloon hold `wanted` bytes, if it was not told so yet.
    pub(super) fn request(
        &mut self,
        qmp: &mut Qmp,
        parts: &SizeParts,
        wanted: u64,
    ) -> Result<(), QmpError> {
        let is_news = self.asked_bytes != Some(wanted)
            && (wanted > 0 || self.asked_bytes.is_some() || parts.ballooned_bytes() > 0);
        if is_news && parts.balloon.is_some_and(|balloon| balloon.driver != Driver::Absent) {
            balloon::request(qmp, parts.initial_bytes, wanted)?;
            (self.asked_bytes, self.most_bytes) = (Some(wanted), 0);
        }
        Ok(())
    }

    /// Counts that the balloon is emptied because the guest needs that.
    pub(super) fn count_release(&mut self) {
        self.releases += 1;
    }

    /// Has the guest take out of its balloon all that was put there.
    pub(super) fn empty(&mut self, cx: &mut VmContext) {
        let asked = self.asked_bytes.take().is_some_and(|bytes| bytes > 0);
        self.most_bytes = 0;
        let VmContext { capabilities, qmp, .. } = cx;
        if let (true, Some(found), Some(qmp)) = (asked, capabilities, qmp.socket())
            && let Err(error) = balloon::request(qmp, found.initial_bytes, 0)
        {
            tracing::error!("its balloon: {error}");
        }
    }

    /// Prepares a detach: nothing is left in the balloon, and nobody asks it for figures.
    pub(super) fn give_back(&mut self, cx: &mut VmContext) {
        self.empty(cx);
        let VmContext { capabilities, qmp, .. } = cx;
        let balloon = capabilities.as_ref().and_then(|found| found.balloon.as_ref());
        if let (Some(_), Some(balloon), Some(qmp)) = (self.polled_s.take(), balloon, qmp.socket())
            && let Err(error) = balloon::poll_stats(qmp, balloon, 0)
        {
            tracing::debug!("its balloon: {error}");
        }
    }

    /// Returns the status of the VM's balloon.
    pub(super) fn status(&self, cx: &VmContext) -> Option<BalloonStatus> {
        cx.capabilities.as_ref()?.balloon_status(now_s(), self.releases)
    }
}
