//! Which of a VM's memory is hot. The worker looks at its ticks, and only as long as nothing has to
//! be evicted just then. `docs/tiering.md`.

mod round;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_api::{Backing, HeatReport, HeatRequest};
use ebb_heat::{Levels, Roots, Schedule, ScheduleSettings, Step, TOP_LEVEL, TrackError, Walk};
use ebb_inspect::Guest;
use ebb_sys::page_idle::PageIdle;
use ebb_sys::pagemap::Pagemap;
use ebb_units::FrameRange;

use self::round::{guest_round, idle_round, vmm_round};
use super::heat::Heat;
use super::run::{By, Run};
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::vm::context::VmContext;
use crate::vm::context::liveness::End;

/// How long a guest may take to boot and be trusted. After this, automatic monitoring goes without
/// that.
const BOOT: Duration = Duration::from_secs(60);
/// A round by idle page tracking looks at all memory. It may take one in this many of a window.
const IDLE_PART: u32 = 4;
/// Time after which a round by the guest's page tables first gives way to eviction.
const TURN: Duration = Duration::from_millis(50);

/// The monitorings of one VM.
pub struct Monitor {
    since: Instant,
    settings: ScheduleSettings,
    /// The schedule; `None`: nobody wants the VM monitored.
    schedule: Option<Schedule>,
    /// When the schedule has something to do next, counted from `since`.
    due: Duration,
    /// The queue of the last monitoring, for the next.
    levels: Option<Levels>,
    roots: Roots,
    run: Option<Run>,
    /// Bytes moved between tiers up to the end of the last monitoring.
    moved_bytes: u64,
    /// What the last monitoring found.
    heat: Option<Heat>,
    failed: Option<String>,
    /// Whether a monitoring is to begin as soon as nothing has to be evicted.
    is_asked: bool,
    /// Why idle page tracking does not work for this VM.
    not_idle: Option<String>,
}

/// What a round needs beside the VM.
pub struct Lent<'a> {
    /// Whether the guest was confirmed just now.
    pub is_trusted: bool,
    /// Called before a round empties the VMM's page table, because a limit uses what that forgets.
    pub before_forgetting: &'a mut dyn FnMut(&VmContext) -> io::Result<()>,
    /// Whether the VM's pages are placed on nodes: that, too, sets the host's marks on them.
    pub is_placed: bool,
}

/// What is due at a tick.
enum Due {
    Nothing,
    GoOn,
    Begin,
    Window { is_last: bool },
}

impl Monitor {
    /// Begins with nothing known.
    pub fn new(settings: ScheduleSettings) -> Monitor {
        Monitor {
            since: Instant::now(),
            settings,
            schedule: None,
            due: Duration::ZERO,
            levels: None,
            roots: Roots::default(),
            run: None,
            moved_bytes: 0,
            heat: None,
            failed: None,
            is_asked: false,
            not_idle: None,
        }
    }

    /// Drops the heat: another kernel may run, which uses its memory differently.
    pub fn on_reset(&mut self) {
        (self.levels, self.heat) = (None, None);
        if self.run.take().is_some() {
            self.failed = Some("the guest was reset or runs another kernel".into());
        }
    }

    /// Has a monitoring begin, unless there are figures and the request wants no fresh ones.
    /// Returns whether one is due now.
    ///
    /// # Errors
    /// Nothing tells which of the VM's pages are used.
    pub fn ask(&mut self, cx: &VmContext, request: HeatRequest) -> Answer<bool> {
        if cx.record.backing == Backing::Hugetlb {
            return Err(not_allowed(
                "nothing tells which of its hugetlb pages are used: start the VM with --backing \
                 thp or small",
            ));
        }
        let begins = self.run.is_none() && (request.fresh || self.heat.is_none());
        if begins {
            self.begin()?;
        }
        Ok(begins)
    }

    fn begin(&mut self) -> Answer<()> {
        let schedule = Schedule::new(self.settings, self.since.elapsed());
        self.schedule = Some(schedule.map_err(failed("monitoring"))?);
        (self.due, self.failed, self.is_asked) = (self.since.elapsed(), None, true);
        Ok(())
    }

    /// Returns what the last monitoring found, if it still tells what is hot.
    pub fn recent_heat(&self) -> Option<&Heat> {
        self.heat.as_ref().filter(|heat| {
            heat.age() <= self.settings.period.saturating_add(self.settings.rarest())
        })
    }

    /// Returns why a monitoring does not see all uses, if that is so on this host.
    pub fn blind_spot(&self) -> Option<&str> {
        self.heat.as_ref().and_then(Heat::blind_spot)
    }

    /// Reports how far the monitoring is, and what was found.
    pub fn report(&self) -> HeatReport {
        HeatReport {
            monitoring: self.run.is_some() || self.is_asked,
            windows_done: self.run.as_ref().map_or(0, |run| run.windows),
            windows: self.settings.rounds,
            failed: self.failed.clone(),
            figures: self.heat.as_ref().map(Heat::figures),
        }
    }

    /// Whether a round may be due. Begins monitorings by itself if they are wanted.
    pub fn may_be_due(&mut self, cx: &VmContext) -> bool {
        if self.schedule.is_none() {
            let known = cx.guest.guest().is_ok() || self.since.elapsed() > BOOT;
            if !is_wanted(cx) || !known {
                return false;
            }
            if let Err(error) = self.begin() {
                tracing::error!("{error}");
                return false;
            }
        }
        let now = self.since.elapsed();
        let latest = self.due.saturating_add(self.settings.window);
        let gives_way = cx.mailbox.is_pressed() && now < latest;
        let is_broken_off = self.run.as_ref().is_some_and(|run| run.rest.is_some());
        !gives_way && (is_broken_off || now >= self.due)
    }

    fn due(&mut self) -> Due {
        if self.run.as_ref().is_some_and(|run| run.rest.is_some()) {
            return Due::GoOn;
        }
        let now = self.since.elapsed();
        match self.schedule.as_mut().map(|schedule| schedule.step(now)) {
            None => Due::Nothing,
            Some(Step::Wait(until)) => {
                self.due = until;
                Due::Nothing
            }
            Some(Step::Begin) => Due::Begin,
            Some(Step::Look) => Due::Window { is_last: false },
            Some(Step::Last) => Due::Window { is_last: true },
        }
    }

    /// Does what is due, after [`Monitor::may_be_due`] and once the guest was confirmed. Returns
    /// whether a monitoring is over, broken off or not; then [`Monitor::end`] must follow. Also
    /// returns why the guest's kernel does not run any more, if that was seen.
    pub fn tick(&mut self, cx: &mut VmContext, lent: &mut Lent<'_>) -> (bool, Option<End>) {
        let mut ended = None;
        let is_over = match self.due() {
            Due::Nothing => false,
            Due::GoOn => self.go_on(cx, lent, &mut ended),
            Due::Begin => {
                self.begin_run(cx, lent, &mut ended);
                false
            }
            Due::Window { is_last } => self.next_window(cx, is_last, lent, &mut ended),
        };
        (is_over, ended)
    }

    fn begin_run(&mut self, cx: &mut VmContext, lent: &mut Lent<'_>, ended: &mut Option<End>) {
        self.is_asked = false;
        let frames = || cx.pager.ram().regions().map(|region| region.frames());
        let queue = || Levels::new(&frames().collect::<Vec<FrameRange>>(), TOP_LEVEL);
        let mut levels = self.levels.take().unwrap_or_else(queue);
        levels.begin();
        let first = match by_guest(cx) {
            Ok((guest, why)) => {
                self.first_round(cx, Run::new(By::Guest(guest), why, levels), lent, ended)
            }
            Err(why) => self.first_round_from_outside(cx, (why, levels), lent, ended),
        };
        match first {
            Ok(run) => (self.run, self.failed) = (Some(run), None),
            Err(why) => self.end_without(cx, why),
        }
    }

    fn first_round(
        &mut self,
        cx: &mut VmContext,
        mut run: Run,
        lent: &mut Lent<'_>,
        ended: &mut Option<End>,
    ) -> Result<Run, String> {
        match self.round(cx, &mut run, Walk::Full, lent, ended) {
            Ok(()) => Ok(run),
            Err(error @ TrackError::NoRoots) => {
                self.first_round_from_outside(cx, (error.to_string(), run.levels), lent, ended)
            }
            Err(_) if matches!(run.by, By::Idle(..)) => {
                self.first_round_from_outside(cx, (run.why, run.levels), lent, ended)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Makes the first round from outside the guest. Idle page tracking needs small pages, because
    /// a huge page has one mark for all of its frames. It also needs pages that are not placed on
    /// nodes: to place them, this process maps them now and then, and that counts as a use.
    fn first_round_from_outside(
        &mut self,
        cx: &mut VmContext,
        (why, levels): (String, Levels),
        lent: &mut Lent<'_>,
        ended: &mut Option<End>,
    ) -> Result<Run, String> {
        let pagemap = Pagemap::open(&cx.process);
        let pagemap = pagemap.map_err(|error| format!("QEMU's page table: {error}"))?;
        if let Some(not_idle) = &self.not_idle {
            let why = format!("{why}; no idle page tracking: {not_idle}");
            return self.first_round(cx, Run::new(By::Vmm(pagemap), why, levels), lent, ended);
        }
        let is_fit = cx.record.backing == Backing::Small && !lent.is_placed;
        let by = match PageIdle::open() {
            Ok(idle) if is_fit => By::Idle(pagemap, idle),
            _ => By::Vmm(pagemap),
        };
        self.first_round(cx, Run::new(by, why, levels), lent, ended)
    }

    /// Begins the next window. Returns whether the monitoring is over.
    fn next_window(
        &mut self,
        cx: &mut VmContext,
        is_last: bool,
        lent: &mut Lent<'_>,
        ended: &mut Option<End>,
    ) -> bool {
        match &mut self.run {
            Some(run) => {
                run.levels.next_window();
                run.windows += 1;
                (run.rest, run.is_last) = (Some(Walk::Pruned), is_last);
                self.go_on(cx, lent, ended)
            }
            // The monitoring was broken off before.
            None => is_last,
        }
    }

    /// Goes on with a round; what it did before it was broken off is done. Returns whether the
    /// monitoring is over.
    fn go_on(&mut self, cx: &mut VmContext, lent: &mut Lent<'_>, ended: &mut Option<End>) -> bool {
        let Some(mut run) = self.run.take() else { return false };
        let Some(walk) = run.rest else { return false };
        if let Err(error) = self.round(cx, &mut run, walk, lent, ended) {
            self.end_without(cx, error.to_string());
            return run.is_last;
        }
        let is_over = run.is_last && run.rest.is_none();
        self.run = Some(run);
        is_over
    }

    /// Ends a monitoring that failed. Figures of a part of a guest are of no use.
    fn end_without(&mut self, cx: &VmContext, why: String) {
        tracing::debug!("not monitored: {why}");
        (self.run, self.failed) = (None, Some(why));
        if !is_wanted(cx) {
            self.schedule = None;
        }
    }

    /// Ends a monitoring that is over, once the schedule was told of it. Returns the monitoring,
    /// unless it was broken off.
    pub fn end(&mut self, cx: &VmContext) -> Option<Run> {
        if !is_wanted(cx) {
            self.schedule = None;
        }
        // Drops the old figures first: both at once would take one byte a page more.
        let run = self.run.take()?;
        self.heat = None;
        Some(run)
    }

    /// Takes what a monitoring found, and keeps its queue for the next.
    pub fn found(&mut self, cx: &VmContext, heat: Heat, levels: Levels) {
        self.heat = Some(heat);
        self.levels = is_wanted(cx).then_some(levels);
    }

    /// Tells the schedule what was moved since the last call.
    pub fn tell_schedule(&mut self, moved_bytes: u64) {
        let newly = moved_bytes.saturating_sub(self.moved_bytes);
        self.moved_bytes = moved_bytes;
        self.schedule.iter_mut().for_each(|schedule| schedule.moved(newly));
    }

    fn round(
        &mut self,
        cx: &mut VmContext,
        run: &mut Run,
        walk: Walk,
        lent: &mut Lent<'_>,
        ended: &mut Option<End>,
    ) -> Result<(), TrackError> {
        let began = Instant::now();
        let round = match &run.by {
            By::Guest(guest) => {
                // Each break-off doubles the time, so that the round comes to its end.
                let turn = TURN * 2_u32.saturating_pow(run.broken_off.min(8));
                let guest = Arc::clone(guest);
                match lent.is_trusted {
                    true => {
                        let levels = &mut run.levels;
                        guest_round(cx, &guest, (walk, turn), (&mut self.roots, levels), ended)?
                    }
                    false => return Err(TrackError::NotRunning),
                }
            }
            By::Idle(pagemap, idle) => {
                let time = self.settings.window / IDLE_PART;
                let saw = (lent.before_forgetting)(cx).map_err(TrackError::from);
                let round = saw
                    .and_then(|()| idle_round(cx, (pagemap, idle), (walk, time), &mut run.levels));
                if let Err(error) = &round {
                    // A VM for which it fails or is too slow is not looked at this way again.
                    self.not_idle = Some(error.to_string());
                }
                Some(round?)
            }
            By::Vmm(pagemap) => {
                (lent.before_forgetting)(cx)?;
                Some(vmm_round(cx, pagemap, walk, &mut run.levels)?)
            }
        };
        run.add(walk, round, began.elapsed());
        Ok(())
    }
}

/// Whether a VM is monitored again and again, because of its tiers or of the pool.
pub fn is_wanted(cx: &VmContext) -> bool {
    cx.record.tiers.is_some() || cx.record.share.is_some()
}

/// Returns the guest if its page tables can tell, else why not. The guest was confirmed before.
fn by_guest(cx: &VmContext) -> Result<(Arc<Guest>, String), String> {
    let guest = cx.guest.guest().map_err(|why| format!("its guest is not trusted: {why}"));
    let why = format!("its kernel is known and trusted: {}", guest?.release());
    if cx.guest.shares_allocator() {
        return Err("it shares its allocator, and its page metadata is not watched".into());
    }
    if !cx.qmp.hears_at_once() {
        return Err("libvirt tells of its resets late, so its page tables are not written".into());
    }
    let guest = cx.guest.witness().cloned().ok_or("its guest is not trusted")?;
    Ok((guest, why))
}
