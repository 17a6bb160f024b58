//! Which of a VM's memory is hot: looked at by its worker, at its ticks, and only as far as
//! nothing has to be evicted just then. `docs/tiering.md`.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use ebb_api::{Backing, HeatReport, HeatRequest, HeatTracker};
use ebb_heat::{
    GuestTracker, HostPages, HostTracker, IdleTracker, Levels, Pace, PagerTables, Roots, Round,
    Settings, Sorted, Step, TOP_LEVEL, TrackError, Tracker, Walk,
};
use ebb_inspect::Guest;
use ebb_sys::page_idle::PageIdle;
use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FrameRange};

use crate::calibrate::Calibrated;
use crate::heat::Heat;
use crate::injector;
use crate::limited::TURN;
use crate::problem::{Answer, failed, not_allowed};
use crate::worker::State;

/// A guest has so long to boot and be trusted before a VM is monitored by itself without that.
const BOOT: Duration = Duration::from_secs(60);
/// Ranges that the VMM is asked to forget at once: a command line has room for them.
const RANGES_AT_ONCE: usize = 4096;
/// A round by idle page tracking may take so much of a window: it looks at all memory.
const IDLE_PART: u32 = 4;

/// What one VM's worker knows of its monitoring.
pub struct Monitor {
    since: Instant,
    /// What reads and writes count for.
    calibrated: Arc<Calibrated>,
    settings: Settings,
    /// None: nobody wants it monitored.
    pace: Option<Pace>,
    /// When the pace has something to do next.
    due: Duration,
    /// The queue of the last monitoring, for the next.
    levels: Option<Levels>,
    roots: Roots,
    run: Option<Run>,
    /// Moved between tiers up to the end of the last monitoring.
    moved_bytes: u64,
    /// What the last one found.
    pub heat: Option<Heat>,
    failed: Option<String>,
    /// One is to begin as soon as nothing has to be evicted.
    is_asked: bool,
    /// Why idle page tracking does not serve this VM.
    not_idle: Option<String>,
}

/// A monitoring under way.
pub struct Run {
    by: By,
    pub why: String,
    pub levels: Levels,
    pub began: Instant,
    pub windows: u8,
    pub looking: Duration,
    /// A round that was broken off, to be gone on with at the next tick.
    rest: Option<Walk>,
    /// How often it was.
    broken_off: u32,
    is_last: bool,
    /// All rounds together.
    pub rounds: Round,
}

enum By {
    /// Its page tables.
    Guest(Arc<Guest>),
    /// The host's marks on the frames that the VMM has mapped.
    Idle(Pagemap, PageIdle),
    /// The VMM's page table.
    Vmm(Pagemap),
}

impl Run {
    /// What tells.
    pub fn tracker(&self) -> HeatTracker {
        match self.by {
            By::Guest(_) => HeatTracker::GuestTables,
            By::Idle(..) => HeatTracker::IdlePages,
            By::Vmm(_) => HeatTracker::VmmTable,
        }
    }
}

impl Monitor {
    /// Nothing is known yet.
    pub fn new(settings: Settings, calibrated: Arc<Calibrated>) -> Monitor {
        Monitor {
            since: Instant::now(),
            calibrated,
            settings,
            pace: None,
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

    /// Another kernel may run, whose memory is used otherwise.
    pub fn lose(&mut self) {
        (self.levels, self.heat) = (None, None);
        if self.run.take().is_some() {
            self.failed = Some("the guest was reset or runs another kernel".into());
        }
    }

    fn begin(&mut self) -> Answer<()> {
        let pace = Pace::new(self.settings, self.since.elapsed());
        self.pace = Some(pace.map_err(failed("monitoring"))?);
        (self.due, self.failed, self.is_asked) = (self.since.elapsed(), None, true);
        Ok(())
    }

    /// What the last one found, if it still tells what is hot.
    pub fn recent_heat(&self) -> Option<&Heat> {
        self.heat.as_ref().filter(|heat| {
            heat.age() <= self.settings.period.saturating_add(self.settings.rarest())
        })
    }

    /// Why what it finds is not all, if that is so on this host.
    pub fn blind_spot(&self) -> Option<&str> {
        self.heat.as_ref().and_then(Heat::blind_spot)
    }

    /// How far it is, and what was found.
    pub fn report(&self) -> HeatReport {
        HeatReport {
            monitoring: self.run.is_some() || self.is_asked,
            windows_done: self.run.as_ref().map_or(0, |run| run.windows),
            windows: self.settings.rounds,
            failed: self.failed.clone(),
            figures: self.heat.as_ref().map(Heat::figures),
        }
    }
}

/// The VMM's page table, emptied by an injected call.
struct Vmm<'a>(&'a Process);

impl HostPages for Vmm<'_> {
    fn forget(&self, ranges: &[HvaRange]) -> io::Result<()> {
        ranges.chunks(RANGES_AT_ONCE).try_for_each(|ranges| injector::forget(self.0, ranges))
    }
}

impl State {
    /// Begins a monitoring, unless there are figures or new ones are not asked for.
    pub(crate) fn ask_heat(&mut self, request: HeatRequest) -> Answer<HeatReport> {
        if self.held.record.backing == Backing::Hugetlb {
            return Err(not_allowed(
                "nothing tells which of its hugetlb pages are used: start the VM with --backing \
                 thp or small",
            ));
        }
        let monitor = &mut self.monitor;
        if monitor.run.is_none() && (request.fresh || monitor.heat.is_none()) {
            monitor.begin()?;
            self.keep_heat();
        }
        Ok(self.monitor.report())
    }

    /// Whether it is monitored again and again, for the sake of its tiers or of the pool.
    pub(crate) fn is_monitored(&self) -> bool {
        self.held.record.tiers.is_some() || self.held.record.share.is_some()
    }

    /// Does what is due.
    pub(crate) fn keep_heat(&mut self) {
        if self.monitor.pace.is_none() {
            let known = self.insight.guest().is_ok() || self.monitor.since.elapsed() > BOOT;
            if !self.is_monitored() || !known {
                return;
            }
            if let Err(error) = self.monitor.begin() {
                return tracing::error!("{}: {error}", self.held.record.name);
            }
        }
        let monitor = &mut self.monitor;
        let now = monitor.since.elapsed();
        let latest = monitor.due.saturating_add(monitor.settings.window);
        if self.pressed.load(Acquire) && now < latest {
            return;
        }
        if monitor.run.as_ref().is_some_and(|run| run.rest.is_some()) {
            return self.go_on();
        }
        match monitor.pace.as_mut().map(|pace| pace.step(now)) {
            None => {}
            Some(Step::Wait(until)) => monitor.due = until,
            Some(Step::Begin) => self.begin_monitoring(),
            Some(Step::Look) => self.next_window(false),
            Some(Step::Last) => self.next_window(true),
        }
    }

    fn begin_monitoring(&mut self) {
        self.monitor.is_asked = false;
        let frames = || self.held.pager.ram().regions().map(|region| region.frames());
        let queue = || Levels::new(&frames().collect::<Vec<FrameRange>>(), TOP_LEVEL);
        let mut levels = self.monitor.levels.take().unwrap_or_else(queue);
        levels.begin();
        let first = match self.by_guest() {
            Ok((guest, why)) => self.first_round(By::Guest(guest), why, levels),
            Err(why) => self.first_round_from_outside(why, levels),
        };
        match first {
            Ok(run) => (self.monitor.run, self.monitor.failed) = (Some(run), None),
            Err(why) => self.end_without(why),
        }
    }

    /// The guest, if its page tables can tell; else why not.
    fn by_guest(&mut self) -> Result<(Arc<Guest>, String), String> {
        if self.insight.guest().is_ok() {
            self.confirm();
        }
        let guest = self.insight.guest().map_err(|why| format!("its guest is not trusted: {why}"));
        let why = format!("its kernel is known and trusted: {}", guest?.release());
        if self.may_share() {
            return Err("it shares its allocator, and its page metadata is not watched".into());
        }
        let guest = self.witness.clone().ok_or("its guest is not trusted")?;
        Ok((guest, why))
    }

    fn first_round(&mut self, by: By, why: String, levels: Levels) -> Result<Run, String> {
        let (began, rounds) = (Instant::now(), Round::default());
        let mut run = Run {
            by,
            why,
            levels,
            began,
            windows: 0,
            looking: Duration::ZERO,
            rest: None,
            broken_off: 0,
            is_last: false,
            rounds,
        };
        match self.round(&mut run, Walk::Full) {
            Ok(()) => Ok(run),
            Err(error @ TrackError::NoRoots) => {
                self.first_round_from_outside(error.to_string(), run.levels)
            }
            Err(_) if matches!(run.by, By::Idle(..)) => {
                self.first_round_from_outside(run.why, run.levels)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Huge pages have one mark for all of their frames. What is placed on nodes the daemon
    /// maps now and then, which is a use like others.
    fn first_round_from_outside(&mut self, why: String, levels: Levels) -> Result<Run, String> {
        let pagemap = Pagemap::open(&self.held.process);
        let pagemap = pagemap.map_err(|error| format!("QEMU's page table: {error}"))?;
        if let Some(not_idle) = &self.monitor.not_idle {
            let why = format!("{why}; no idle page tracking: {not_idle}");
            return self.first_round(By::Vmm(pagemap), why, levels);
        }
        let is_fit = self.held.record.backing == Backing::Small && self.placing.is_none();
        let by = match PageIdle::open() {
            Ok(idle) if is_fit => By::Idle(pagemap, idle),
            _ => By::Vmm(pagemap),
        };
        self.first_round(by, why, levels)
    }

    fn next_window(&mut self, is_last: bool) {
        match &mut self.monitor.run {
            Some(run) => {
                run.levels.next_window();
                run.windows += 1;
                (run.rest, run.is_last) = (Some(Walk::Pruned), is_last);
                self.go_on();
            }
            // Broken off before.
            None if is_last => self.end_monitoring(),
            None => {}
        }
    }

    /// Goes on with a round: what it did before it was broken off is done.
    fn go_on(&mut self) {
        let Some(mut run) = self.monitor.run.take() else { return };
        let Some(walk) = run.rest else { return };
        if let Err(error) = self.round(&mut run, walk) {
            return self.end_without(error.to_string());
        }
        let ends = run.is_last && run.rest.is_none();
        self.monitor.run = Some(run);
        if ends {
            self.end_monitoring();
        }
    }

    /// Of no use are figures of half a guest.
    fn end_without(&mut self, why: String) {
        tracing::debug!("{}: not monitored: {why}", self.held.record.name);
        (self.monitor.run, self.monitor.failed) = (None, Some(why));
        if !self.is_monitored() {
            self.monitor.pace = None;
        }
    }

    fn end_monitoring(&mut self) {
        let goes_on = self.is_monitored();
        if self.placing.is_none() {
            self.tell_pace();
        }
        let monitor = &mut self.monitor;
        if !goes_on {
            monitor.pace = None;
        }
        let Some(run) = monitor.run.take() else { return };
        // The old figures first: both at once would be one byte a page more.
        monitor.heat = None;
        let weights = match &self.placing {
            Some(placing) => monitor.calibrated.node_weights(placing.ends()),
            None => monitor.calibrated.weights(),
        };
        let threshold = self.held.record.settings.looking.threshold();
        let sorted = Sorted::new(&run.levels, weights);
        let accelerator = self.held.record.accelerator;
        monitor.heat = Some(Heat::new(&run, &sorted, weights, threshold, accelerator));
        monitor.levels = goes_on.then_some(run.levels);
        self.place(sorted, weights, run.windows, matches!(run.by, By::Guest(_)));
    }

    /// What was moved since it was told so last; between nodes that is done when the thread that
    /// moves has ended, some time after a monitoring.
    pub(crate) fn tell_pace(&mut self) {
        let moved_bytes = self.moved_bytes();
        let monitor = &mut self.monitor;
        let newly = moved_bytes.saturating_sub(monitor.moved_bytes);
        monitor.moved_bytes = moved_bytes;
        monitor.pace.iter_mut().for_each(|pace| pace.moved(newly));
    }

    /// Between its memory and where else it rests, in both directions, and between nodes.
    fn moved_bytes(&self) -> u64 {
        let between = self.placing.as_ref().map_or(0, |placing| placing.figures().moved_bytes);
        let counters = &self.held.pager.counters;
        let up = counters.refilled_frames.load(Relaxed) + counters.ahead_frames.load(Relaxed);
        let down = self.limiter.as_ref().map_or(0, |limiter| limiter.total.frames());
        (up + down) * FRAME_BYTES + between
    }

    fn round(&mut self, run: &mut Run, walk: Walk) -> Result<(), TrackError> {
        let began = Instant::now();
        // Each time it was broken off it has twice the time, so that it comes to its end.
        let turn = TURN * 2_u32.saturating_pow(run.broken_off.min(8));
        let round = match &run.by {
            By::Guest(guest) => {
                self.guest_round(&Arc::clone(guest), walk, &mut run.levels, turn)?
            }
            By::Idle(pagemap, idle) => {
                let round = self.idle_round((pagemap, idle), walk, &mut run.levels);
                if let Err(error) = &round {
                    // A VM for which it fails, or is too slow, is not looked at so again.
                    self.monitor.not_idle = Some(error.to_string());
                }
                Some(round?)
            }
            By::Vmm(pagemap) => Some(self.vmm_round(pagemap, walk, &mut run.levels)?),
        };
        run.looking += began.elapsed();
        let Some(round) = round else {
            (run.rest, run.broken_off) = (Some(walk), run.broken_off + 1);
            return Ok(());
        };
        (run.rest, run.broken_off) = (None, 0);
        let all = &mut run.rounds;
        all.tables += round.tables;
        all.pruned_tables += round.pruned_tables;
        all.cleared_entries += round.cleared_entries;
        all.is_truncated |= round.is_truncated;
        Ok(())
    }

    /// Who has to evict meanwhile gets its turn: then it is broken off after `turn`, which is
    /// none.
    fn guest_round(
        &mut self,
        guest: &Guest,
        walk: Walk,
        levels: &mut Levels,
        turn: Duration,
    ) -> Result<Option<Round>, TrackError> {
        let trusted = self.insight.guest().is_ok() && self.confirm();
        let now = self.witness.clone().filter(|now| trusted && now.note() == guest.note());
        let guest = now.ok_or(TrackError::NotRunning)?;
        let (pager, pressed) = (Arc::clone(&self.held.pager), Arc::clone(&self.pressed));
        let (pulse, began) = (RefCell::new(self.pulse()), Instant::now());
        let goes_on = || {
            (!pressed.load(Acquire) || began.elapsed() < turn)
                && pulse.borrow_mut().hears_no_reset()
        };
        let mut roots = std::mem::take(&mut self.monitor.roots);
        let tables = PagerTables::new(&pager);
        let result = GuestTracker::new(&tables, &guest, &mut roots, &goes_on).round(walk, levels);
        self.monitor.roots = roots;
        let pulse = pulse.into_inner();
        let gave_way = matches!(result, Err(TrackError::NotRunning)) && pulse.is_sound();
        self.end_pulse(pulse);
        if gave_way { Ok(None) } else { result.map(Some) }
    }

    /// What a limit goes by is about to be forgotten.
    fn see_mapped(&mut self) -> io::Result<()> {
        let Some(limiter) = &mut self.limiter else { return Ok(()) };
        limiter.see_mapped(&self.held.pager)
    }

    fn idle_round(
        &mut self,
        (pagemap, idle): (&Pagemap, &PageIdle),
        walk: Walk,
        levels: &mut Levels,
    ) -> Result<Round, TrackError> {
        self.see_mapped()?;
        let (held, time) = (&self.held, self.monitor.settings.window / IDLE_PART);
        let (pages, began) = (Vmm(&held.process), Instant::now());
        let goes_on = || began.elapsed() <= time;
        let mut tracker = IdleTracker::new(held.pager.ram(), pagemap, idle, &pages, &goes_on);
        tracker.round(walk, levels)
    }

    fn vmm_round(
        &mut self,
        pagemap: &Pagemap,
        walk: Walk,
        levels: &mut Levels,
    ) -> Result<Round, TrackError> {
        self.see_mapped()?;
        let held = &self.held;
        HostTracker::new(held.pager.ram(), pagemap, &Vmm(&held.process)).round(walk, levels)
    }
}
