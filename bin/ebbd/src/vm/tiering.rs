//! A VM's tiers: which of its memory is hot, and on which node it is.

pub mod heat;
mod monitor;
mod order;
mod placing;
mod run;
mod status;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_api::{HeatReport, HeatRequest, TierStatus};
use ebb_heat::{Sorted, Weights};
use ebb_inspect::PageKind;
use ebb_pager::Evicted;
use ebb_units::{FRAME_BYTES, FrameRange};

use self::heat::{Heat, least_weight};
use self::monitor::{Lent, Monitor};
use self::order::Known;
use self::placing::Placing;
use self::run::{By, Run};
use super::context::VmContext;
use super::context::liveness::End;
use crate::model::api_error::Answer;
use crate::system::calibration::Calibrated;

pub use self::placing::check_rate;

/// The kernel's own memory counts as used in one in this many of the windows: the guest's page
/// tables tell nothing of it.
const KERNEL_PART: u64 = 2;
/// The margin is one in this many of the windows. Pages whose uses differ by less would change
/// places again and again.
const MARGIN_PART: u64 = 4;

/// The controller of one VM's tiers.
pub struct Tiering {
    monitor: Monitor,
    /// Places the VM's pages, if its tiers are NUMA nodes.
    placing: Option<Placing>,
    /// By how much reads and writes are weighted.
    calibrated: Arc<Calibrated>,
}

impl Tiering {
    /// Begins with nothing known of which memory is hot. If the tiers are nodes, the pages are
    /// placed from now on.
    pub fn new(cx: &VmContext, calibrated: Arc<Calibrated>) -> Tiering {
        let settings = cx.record.settings.monitoring.schedule(cx.record.backing);
        let ladder = cx.record.tiers.as_ref().and_then(|tiers| tiers.ladder.parse().ok());
        let rate = cx.record.settings.move_rate;
        let placing = ladder.and_then(|ladder| Placing::start(&ladder, &cx.pager, rate));
        Tiering { monitor: Monitor::new(settings), placing, calibrated }
    }

    /// Drops the heat: another kernel may run, which uses its memory differently.
    pub fn on_reset(&mut self) {
        self.monitor.on_reset();
        self.placing.iter_mut().for_each(Placing::on_reset);
    }

    /// Has a monitoring begin, unless there are figures and the request wants no fresh ones.
    /// Returns whether one is due now.
    ///
    /// # Errors
    /// Nothing tells which of the VM's pages are used.
    pub fn ask(&mut self, cx: &VmContext, request: HeatRequest) -> Answer<bool> {
        self.monitor.ask(cx, request)
    }

    /// Reports how far the monitoring is, and what was found.
    pub fn report(&self) -> HeatReport {
        self.monitor.report()
    }

    /// Returns what the last monitoring found, if it still tells what is hot.
    pub fn recent_heat(&self) -> Option<&Heat> {
        self.monitor.recent_heat()
    }

    /// Whether a round of a monitoring may be due. The guest is to be confirmed before it.
    pub fn may_be_due(&mut self, cx: &VmContext) -> bool {
        self.monitor.may_be_due(cx)
    }

    /// Does what is due of a monitoring. `before_forgetting` is called before the VMM's page table
    /// is emptied. `evicted`: all that was evicted so far. Returns why the guest's kernel does not
    /// run any more, if that was seen.
    pub fn monitor(
        &mut self,
        cx: &mut VmContext,
        is_trusted: bool,
        before_forgetting: &mut dyn FnMut(&VmContext) -> io::Result<()>,
        evicted: Evicted,
    ) -> Option<End> {
        let mut lent = Lent { is_trusted, before_forgetting, is_placed: self.placing.is_some() };
        let (is_over, ended) = self.monitor.tick(cx, &mut lent);
        if is_over {
            if self.placing.is_none() {
                // Also tells of a monitoring that was broken off: else it would be tried in each
                // period.
                self.monitor.tell_schedule(self.moved_bytes(cx, evicted));
            }
            if let Some(run) = self.monitor.end(cx) {
                self.end(cx, run);
            }
        }
        ended
    }

    fn end(&mut self, cx: &VmContext, run: Run) {
        let weights = match &self.placing {
            Some(placing) => self.calibrated.node_weights(placing.ends()),
            None => self.calibrated.weights(),
        };
        let threshold = cx.record.settings.monitoring.threshold();
        let sorted = Sorted::new(&run.levels, weights);
        let heat = Heat::new(&run, &sorted, weights, threshold, cx.record.accelerator);
        let (windows, is_by_guest) = (run.windows, matches!(run.by, By::Guest(_)));
        self.monitor.found(cx, heat, run.levels);
        self.place(cx, sorted, weights, (windows, is_by_guest));
    }

    /// Has the pages placed by what a monitoring of so many windows found. A monitoring by the
    /// guest's page tables knows nothing of the guest's kernel.
    fn place(
        &mut self,
        cx: &VmContext,
        sorted: Sorted,
        weights: Weights,
        (windows, is_by_guest): (u8, bool),
    ) {
        let Some(placing) = self.placing.as_mut().filter(|_| cx.may_take().is_ok()) else { return };
        // Read by this thread, which also evicts: so what it reads in place stays resident.
        let kernel = if is_by_guest { kernel_frames(cx) } else { Vec::new() };
        // The degree of a page with the lighter kind of use in every window.
        let all = least_weight(weights) * u64::from(windows);
        let degrees = |degree: u64| u32::try_from(degree).unwrap_or(u32::MAX);
        placing.place_next(Known {
            sorted: Some(sorted),
            kernel,
            kernel_degree: degrees(all / KERNEL_PART),
            margin_degrees: degrees(all / MARGIN_PART),
        });
    }

    /// Has memory placed that the guest touched between monitorings, and tells the schedule what
    /// was moved.
    pub fn keep_placing(&mut self, cx: &VmContext, evicted: Evicted) {
        let Some(placing) = &mut self.placing else { return };
        let came_bytes = came_frames(cx) * FRAME_BYTES;
        placing.keep(cx.pager.ram().resident_bytes().unwrap_or(0), came_bytes);
        if placing.has_news() {
            let moved_bytes = self.moved_bytes(cx, evicted);
            self.monitor.tell_schedule(moved_bytes);
        }
    }

    /// Returns the bytes moved so far: refilled, evicted, and moved between nodes.
    fn moved_bytes(&self, cx: &VmContext, evicted: Evicted) -> u64 {
        let between = self.placing.as_ref().map_or(0, |placing| placing.figures().moved_bytes);
        (came_frames(cx) + evicted.frames()) * FRAME_BYTES + between
    }

    /// Returns what the VM does with its tiers. `active_bytes`: the bytes that it works with.
    pub fn status(&self, cx: &VmContext, active_bytes: Option<u64>) -> Option<TierStatus> {
        let mut status = self.figures(cx, active_bytes)?;
        status.warnings = self.warnings_beside(cx, Some(&status));
        Some(status)
    }

    /// Returns what the operator should know.
    pub fn warnings(&self, cx: &VmContext, active_bytes: Option<u64>) -> Vec<String> {
        self.warnings_beside(cx, self.figures(cx, active_bytes).as_ref())
    }

    fn figures(&self, cx: &VmContext, active_bytes: Option<u64>) -> Option<TierStatus> {
        let figures = self.placing.as_ref().map(Placing::figures);
        let hot_bytes = self.recent_heat().map(Heat::hot_bytes);
        status::of(cx, active_bytes, hot_bytes, figures)
    }

    fn warnings_beside(&self, cx: &VmContext, figures: Option<&TierStatus>) -> Vec<String> {
        let mut all = Vec::new();
        all.extend(figures.and_then(status::warning));
        if let (true, Some(why)) = (monitor::is_wanted(cx), self.monitor.blind_spot()) {
            all.push(format!("not each use of its memory is seen: {why}"));
        }
        all.extend(self.placing.iter().flat_map(placing::warnings));
        all
    }
}

/// Returns the number of frames refilled so far.
fn came_frames(cx: &VmContext) -> u64 {
    let counters = &cx.pager.counters();
    counters.refilled_frames.load(Relaxed) + counters.ahead_frames.load(Relaxed)
}

fn kernel_frames(cx: &VmContext) -> Vec<FrameRange> {
    let mut kernel: Vec<FrameRange> = Vec::new();
    let Some(guest) = cx.guest.witness() else { return kernel };
    guest.memmap().kinds(&cx.pager.view(), guest.layout(), |frames, kind| {
        if matches!(kind, PageKind::Table | PageKind::Slab | PageKind::Other) {
            frames.join(&mut kernel);
        }
    });
    kernel
}
