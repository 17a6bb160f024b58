//! A VM's tiers: which of its memory is hot, and on which node it is.

pub mod heat;
mod monitor;
mod order;
mod placing;
mod run;
mod status;

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

/// A guest's page tables tell nothing of its kernel's own memory: that counts as used in this part
/// of the windows.
const KERNEL_PART: u64 = 2;
/// A part of the windows. Pages that were used in numbers of them nearer to each other than this
/// would change places again and again.
const MARGIN_PART: u64 = 4;

/// What one VM's worker knows of its tiers.
pub struct Tiering {
    monitor: Monitor,
    /// Where its pages are, if its tiers are NUMA nodes.
    placing: Option<Placing>,
    /// What reads and writes count for.
    calibrated: Arc<Calibrated>,
}

impl Tiering {
    /// Nothing is known yet of which memory is hot. Its pages are placed from now on, where its
    /// tiers are nodes.
    pub fn new(cx: &VmContext, calibrated: Arc<Calibrated>) -> Tiering {
        let settings = cx.record.settings.looking.settings(cx.record.backing);
        let ladder = cx.record.tiers.as_ref().and_then(|tiers| tiers.ladder.parse().ok());
        let rate = cx.record.settings.move_rate;
        let placing = ladder.and_then(|ladder| Placing::start(&ladder, &cx.pager, rate));
        Tiering { monitor: Monitor::new(settings), placing, calibrated }
    }

    /// Another kernel may run, whose memory is used otherwise.
    pub fn on_reset(&mut self) {
        self.monitor.on_reset();
        self.placing.iter_mut().for_each(Placing::on_reset);
    }

    /// Has a monitoring begin, unless there are figures or new ones are not asked for; `true`: it
    /// is due now.
    ///
    /// # Errors
    /// Nothing tells which of the VM's pages are used.
    pub fn ask(&mut self, cx: &VmContext, request: HeatRequest) -> Answer<bool> {
        self.monitor.ask(cx, request)
    }

    /// How far a monitoring is, and what was found.
    pub fn report(&self) -> HeatReport {
        self.monitor.report()
    }

    /// What the last monitoring found, if it still tells what is hot.
    pub fn recent_heat(&self) -> Option<&Heat> {
        self.monitor.recent_heat()
    }

    /// Whether a round of a monitoring may be due, before which the guest is to be confirmed.
    pub fn may_be_due(&mut self, cx: &VmContext) -> bool {
        self.monitor.may_be_due(cx)
    }

    /// Does what is due of a monitoring, of a guest that is trusted or not. `before_forgetting` is called before the VMM's page table
    /// is emptied; `evicted` is all that went by now. Returns why the guest's kernel does not run
    /// any more, if that was seen.
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
                // Also of one that was broken off: else it would be tried in each period.
                self.monitor.tell_pace(self.moved_bytes(cx, evicted));
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
        let threshold = cx.record.settings.looking.threshold();
        let sorted = Sorted::new(&run.levels, weights);
        let heat = Heat::new(&run, &sorted, weights, threshold, cx.record.accelerator);
        let (windows, is_by_guest) = (run.windows, matches!(run.by, By::Guest(_)));
        self.monitor.found(cx, heat, run.levels);
        self.place(cx, sorted, weights, (windows, is_by_guest));
    }

    /// Has its pages placed by what a monitoring of so many windows found. By a guest's page tables
    /// nothing is known of its kernel.
    fn place(
        &mut self,
        cx: &VmContext,
        sorted: Sorted,
        weights: Weights,
        (windows, is_by_guest): (u8, bool),
    ) {
        let Some(placing) = self.placing.as_mut().filter(|_| cx.may_take().is_ok()) else { return };
        // By this thread, which evicts: what it reads in place stays.
        let kernel = if is_by_guest { kernel_frames(cx) } else { Vec::new() };
        // Of the lighter kind of use.
        let all = least_weight(weights) * u64::from(windows);
        let degrees = |degree: u64| u32::try_from(degree).unwrap_or(u32::MAX);
        placing.place_next(Known {
            sorted: Some(sorted),
            kernel,
            kernel_degree: degrees(all / KERNEL_PART),
            margin_degrees: degrees(all / MARGIN_PART),
        });
    }

    /// Sees to what the guest touched between monitorings, and tells the pace what was moved.
    pub fn keep_placing(&mut self, cx: &VmContext, evicted: Evicted) {
        let Some(placing) = &mut self.placing else { return };
        let came_bytes = came_frames(cx) * FRAME_BYTES;
        placing.keep(cx.pager.ram().resident_bytes().unwrap_or(0), came_bytes);
        if placing.has_news() {
            let moved_bytes = self.moved_bytes(cx, evicted);
            self.monitor.tell_pace(moved_bytes);
        }
    }

    /// Between its memory and where else it is, in both directions, and between nodes.
    fn moved_bytes(&self, cx: &VmContext, evicted: Evicted) -> u64 {
        let between = self.placing.as_ref().map_or(0, |placing| placing.figures().moved_bytes);
        (came_frames(cx) + evicted.frames()) * FRAME_BYTES + between
    }

    /// What the VM does with its tiers; `active_bytes` is what it works with.
    pub fn status(&self, cx: &VmContext, active_bytes: Option<u64>) -> Option<TierStatus> {
        let figures = self.placing.as_ref().map(Placing::figures);
        let hot_bytes = self.recent_heat().map(Heat::hot_bytes);
        status::of(cx, active_bytes, hot_bytes, figures)
    }

    /// What the operator should know.
    pub fn warnings(&self, cx: &VmContext, active_bytes: Option<u64>) -> Vec<String> {
        let mut all = Vec::new();
        all.extend(self.status(cx, active_bytes).as_ref().and_then(status::warning));
        if let (true, Some(why)) = (monitor::is_wanted(cx), self.monitor.blind_spot()) {
            all.push(format!("not each use of its memory is seen: {why}"));
        }
        all.extend(self.placing.iter().flat_map(placing::warnings));
        all
    }
}

/// Frames that came back from elsewhere by now.
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
