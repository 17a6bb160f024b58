//! The worker of one VM: inspects, reclaims, answers. Faults are served by
//! another thread, which never waits for this one.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ebb_api::{
    AutoRequest, AutoStatus, Backing, DetachReport, DmaMode, EvictReport, EvictRequest, HeatReport,
    HeatRequest, LimitRequest, LimitStatus, Mode, ReclaimReport, ReclaimRequest, ResizeReport,
    ResizeRequest, Skipped, VmStatus,
};
use ebb_inspect::{Block, Guest};
use ebb_reclaim::vprobe;
use ebb_units::{Bytes, FRAME_BYTES, FrameRange};
use ebb_vm::layout::Added;
use serde_json::json;
use tokio::sync::oneshot;

use crate::calibrate::Calibrated;
use crate::compaction::Compaction;
use crate::devices::Devices;
use crate::failpoint;
use crate::frame_set::FrameSet;
use crate::held::{Held, LEAVING};
use crate::insight::Insight;
use crate::life::Life;
use crate::limiter::Limiter;
use crate::listing::Listing;
use crate::monitor::Monitor;
use crate::open_files::OpenFiles;
use crate::placing::Placing;
use crate::pool::Share;
use crate::problem::{Answer, Refused, failed, not_allowed, unsaved};
use crate::record::Record;
use crate::reserve::Reserve;
use crate::retry::Retry;
use crate::serving::Serving;
use crate::sharing::Sharing;
use crate::sizing::Sizing;
use crate::small_pages;
use crate::status;
use crate::trouble::{self, Attempt, Place, Trouble};
use crate::unplugged::Unplugged;

/// Left at the heads of the guest's free lists, where it takes memory next.
pub const RESERVE_BYTES: u64 = 64 << 20;
/// Events of the VMM are looked for this often.
const TICK: Duration = Duration::from_millis(200);
/// Others see figures so old at most, unless the worker is busy.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// A guest that wants memory of a batch being emptied waits for all of it:
/// about 2 ms with small pages, a quarter with huge ones.
const BATCH_SMALL_BYTES: u64 = 8 << 20;
const BATCH_HUGE_BYTES: u64 = 64 << 20;
/// A QEMU that refused or did not answer is left alone for so long, at first and at most.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MOST: Duration = Duration::from_secs(10);
/// So many passes, where QEMU is too slow to answer in the middle of one.
const TRIES: u32 = 4;

/// What a worker is asked to do; each with a place for its answer.
pub enum Command {
    /// Tell everything; `true`: with every frame classified.
    Status(bool, oneshot::Sender<Answer<VmStatus>>),
    /// Take free memory once.
    Reclaim(ReclaimRequest, oneshot::Sender<Answer<ReclaimReport>>),
    /// Take it by itself.
    Auto(AutoRequest, oneshot::Sender<Answer<AutoStatus>>),
    /// Hold resident memory at a limit.
    Limit(LimitRequest, oneshot::Sender<Answer<LimitStatus>>),
    /// More is resident than the limit allows.
    Pressure,
    /// Bring the VM to another size.
    Resize(ResizeRequest, oneshot::Sender<Answer<ResizeReport>>),
    /// Tell how far that is.
    Size(oneshot::Sender<Answer<ResizeReport>>),
    /// The guest touched what it is not to have.
    Violation,
    /// Save and empty frames whether used or not.
    Evict(EvictRequest, oneshot::Sender<Answer<EvictReport>>),
    /// Begin to find out which memory is hot.
    Monitor(HeatRequest, oneshot::Sender<Answer<HeatReport>>),
    /// Tell how far that is, and what was found.
    Heat(oneshot::Sender<Answer<HeatReport>>),
    /// Put it into the pool, or take it out.
    Share(Option<Share>, oneshot::Sender<Answer<()>>),
    /// The pool's word on its limit.
    Allow(Option<u64>, oneshot::Sender<Answer<()>>),
    /// Say that commands are obeyed.
    Ready(oneshot::Sender<Answer<()>>),
    /// Let the VM go.
    Detach(oneshot::Sender<Answer<DetachReport>>),
    /// The VMM ended, or its faults cannot be read: why.
    Gone(std::io::Result<()>),
    /// A thread of this VM panicked, and said so.
    Panicked(String),
}

impl Command {
    /// Nobody waits for its answer any more: who asked was told that nothing was done.
    fn is_moot(&self) -> bool {
        match self {
            Command::Status(_, to) => to.is_closed(),
            Command::Reclaim(_, to) => to.is_closed(),
            Command::Auto(_, to) => to.is_closed(),
            Command::Limit(_, to) => to.is_closed(),
            Command::Resize(_, to) => to.is_closed(),
            Command::Size(to) => to.is_closed(),
            Command::Evict(_, to) => to.is_closed(),
            Command::Monitor(_, to) => to.is_closed(),
            Command::Heat(to) => to.is_closed(),
            Command::Share(_, to) | Command::Ready(to) => to.is_closed(),
            Command::Detach(to) => to.is_closed(),
            Command::Pressure
            | Command::Violation
            | Command::Allow(..)
            | Command::Gone(_)
            | Command::Panicked(_) => false,
        }
    }
}

/// A VM whose faults are served, and whose worker can begin.
pub struct Ready {
    held: Held,
    faults: Serving,
    commands: Sender<Command>,
    mailbox: Receiver<Command>,
}

impl Ready {
    /// Serves its faults.
    ///
    /// # Errors
    /// Threads cannot be made; with it comes the VM.
    pub fn new(held: Held) -> Result<Ready, (std::io::Error, Box<Held>)> {
        let (commands, mailbox) = channel();
        let to = commands.clone();
        // A worker that is gone has ended for good, or panicked itself.
        held.pager.on_panic(move |why| drop(to.send(Command::Panicked(why))));
        let faults = match Serving::start(&held, &commands) {
            Ok(faults) => faults,
            Err(error) => return Err((error, Box::new(held))),
        };
        held.pager.wake_all().unwrap_or_else(|error| tracing::debug!("wake: {error}"));
        Ok(Ready { held, faults, commands, mailbox })
    }

    /// What is on record of it.
    pub fn record(&self) -> &Record {
        &self.held.record
    }

    /// Where commands go.
    pub fn commands(&self) -> Sender<Command> {
        self.commands.clone()
    }

    /// Does everything else, until the VM is not held any more. What is known of it is told
    /// by `listing`.
    pub fn run(self, calibrated: Arc<Calibrated>, listing: &Arc<Listing>) -> Outcome {
        let Ready { held, faults, commands, mailbox } = self;
        State::new(held, calibrated, faults, commands, listing).run(&mailbox)
    }
}

/// Why a worker ended.
pub enum Outcome {
    /// The VM is not held any more; what is left to say once that is known to everybody.
    Ended(Option<Farewell>),
    /// A thread of this VM panicked, and said so.
    Panicked(String),
}

/// All that the worker's thread owns.
pub struct State {
    pub(crate) held: Held,
    pub(crate) insight: Insight,
    /// Who reaches its memory by itself.
    pub(crate) devices: Devices,
    /// Whom the pager was told of.
    pub(crate) witness: Option<Arc<Guest>>,
    /// The frames that each look at that guest reads.
    pub(crate) needed: FrameSet,
    pub(crate) last: Option<ReclaimReport>,
    /// What a limit needs to know, while there is one.
    pub(crate) limiter: Option<Limiter>,
    /// Which memory is hot.
    pub(crate) monitor: Monitor,
    /// Where its pages are, if its tiers are NUMA nodes.
    pub(crate) placing: Option<Placing>,
    /// What there is with a guest that shares its allocator.
    pub(crate) sharing: Sharing,
    pub(crate) reserve: Reserve,
    /// When that guest puts its memory together.
    pub(crate) compaction: Compaction,
    /// What is known of its size.
    pub(crate) sizing: Sizing,
    /// Why the limit is not held.
    pub(crate) stuck: Option<String>,
    /// What failed when memory was to be evicted.
    pub(crate) trouble: Option<Trouble>,
    /// What failed last since the limit was held.
    pub(crate) last_trouble: Option<String>,
    /// Why the VM's record is not what it should be.
    pub(crate) unsaved: Option<String>,
    /// Pressure was told and is not looked at yet.
    pub(crate) pressed: Arc<AtomicBool>,
    /// The way into its own mailbox.
    pub(crate) own: Sender<Command>,
    /// Which of its memory the VMM has still.
    pub(crate) unplugged: Unplugged,
    /// Memory that came after the VM was held, as QEMU told last.
    pub(crate) plugged: Vec<Added>,
    faults: Option<Serving>,
    blocks: Vec<Block>,
    /// Of its metadata, where not all memory is.
    pub(crate) watched: Vec<FrameRange>,
    due: Instant,
    /// What others see of it.
    listing: Arc<Listing>,
    /// When they see it anew.
    publish: Instant,
    /// When QEMU's socket may be tried.
    pub(crate) dial: Retry,
    /// When it may be asked for small pages alone.
    pub(crate) small_pages: Retry,
}

/// Who waits to hear that the VM was let go, and what of it.
pub type Farewell = (oneshot::Sender<Answer<DetachReport>>, DetachReport);

enum Next {
    Go,
    End(Outcome),
}

impl State {
    fn new(
        held: Held,
        calibrated: Arc<Calibrated>,
        faults: Serving,
        own: Sender<Command>,
        listing: &Arc<Listing>,
    ) -> State {
        let to = own.clone();
        // A worker that is gone stops nothing.
        held.growth.on_violation(move || drop(to.send(Command::Violation)));
        let settings = held.record.settings.looking.settings(held.record.backing);
        let monitor = Monitor::new(settings, calibrated);
        State {
            held,
            insight: Insight::new(),
            devices: Devices::default(),
            witness: None,
            needed: FrameSet::default(),
            last: None,
            limiter: None,
            monitor,
            placing: None,
            sharing: Sharing::default(),
            reserve: Reserve::default(),
            compaction: Compaction::default(),
            sizing: Sizing::default(),
            stuck: None,
            trouble: None,
            last_trouble: None,
            unsaved: None,
            pressed: Arc::default(),
            own,
            unplugged: Unplugged::default(),
            plugged: Vec::new(),
            faults: Some(faults),
            blocks: Vec::new(),
            watched: Vec::new(),
            due: Instant::now(),
            listing: Arc::clone(listing),
            publish: Instant::now(),
            dial: Retry::new(RETRY_FIRST, RETRY_MOST),
            small_pages: Retry::new(RETRY_FIRST, RETRY_MOST),
        }
    }

    fn run(mut self, mailbox: &Receiver<Command>) -> Outcome {
        self.slow_faults();
        self.publish();
        self.look_at_devices();
        self.begin();
        self.begin_placing();
        self.apply_limit();
        let mut due = Instant::now() + TICK;
        loop {
            // By the clock, however many commands there are.
            let wait = due.saturating_duration_since(Instant::now());
            let glance = self.glance_after().filter(|&glance| glance < wait);
            let command = match wait.is_zero() {
                true => Err(RecvTimeoutError::Timeout),
                false => mailbox.recv_timeout(glance.unwrap_or(wait)),
            };
            let next = match command {
                Ok(command) => self.obey(command),
                Err(RecvTimeoutError::Timeout) if glance.is_some() => {
                    self.glance_at_devices();
                    Next::Go
                }
                Err(RecvTimeoutError::Timeout) => {
                    let next = self.tick();
                    due = Instant::now() + TICK;
                    next
                }
                Err(RecvTimeoutError::Disconnected) => Next::End(Outcome::Ended(None)),
            };
            if let Next::End(outcome) = next {
                return outcome;
            }
            if Instant::now() >= self.publish {
                self.publish();
            }
        }
    }

    /// Shows everybody what there is to know.
    fn publish(&mut self) {
        self.publish = Instant::now() + PUBLISH_EVERY;
        match (status::of(self, false), self.member()) {
            (Ok(status), Ok(member)) => self.listing.publish(status, member),
            (Err(error), _) | (_, Err(error)) => {
                tracing::debug!("{}: {error}", self.held.record.name);
            }
        }
    }

    /// Starts a guest that waits before its first instruction until it is held, or was stopped
    /// until its memory is back.
    pub(crate) fn begin(&mut self) {
        if !self.held.record.begin || self.must_rest() {
            return;
        }
        self.reconnect();
        let begun = self.held.qmp.as_mut().map(|qmp| qmp.execute("cont", json!({})));
        match begun {
            Some(Ok(_)) => {
                self.held.record.begin = false;
                self.save();
            }
            Some(Err(error)) => tracing::error!("{}: {error}", self.held.record.name),
            None => {}
        }
    }

    /// An answer that nobody waits for any more is dropped.
    fn obey(&mut self, command: Command) -> Next {
        if command.is_moot() {
            return Next::Go;
        }
        let asks_qemu = match command {
            Command::Status(..) | Command::Pressure | Command::Ready(_) => false,
            Command::Resize(..) | Command::Size(_) => !self.waits(),
            _ => true,
        };
        if asks_qemu {
            // What it takes may need QEMU, which may wait for room; so it goes on until the next
            // look at the limit.
            self.held.pager.halt_above(u64::MAX);
        }
        self.glance_at_regions();
        self.notice_reset();
        self.glance_at_devices();
        match command {
            Command::Status(counts, to) => {
                if !self.waits() {
                    if self.insight.guest().is_err() {
                        self.confirm();
                    }
                    self.glance_at_offers();
                }
                self.judge_restored();
                drop(to.send(status::of(self, counts)));
            }
            Command::Ready(to) => drop(to.send(Ok(()))),
            Command::Reclaim(request, to) => drop(to.send(self.reclaim(request))),
            Command::Auto(request, to) => drop(to.send(self.set_auto(request))),
            Command::Limit(request, to) => drop(to.send(self.set_limit(request))),
            Command::Pressure => self.hold_limit(&mut OpenFiles::default()),
            Command::Resize(request, to) => drop(to.send(self.resize(request))),
            Command::Size(to) => {
                self.keep_sizes();
                drop(to.send(self.size_report()));
            }
            Command::Violation => self.violated(),
            Command::Evict(request, to) => drop(to.send(self.evict(request.bytes))),
            Command::Monitor(request, to) => drop(to.send(self.ask_heat(request))),
            Command::Heat(to) => drop(to.send(Ok(self.monitor.report()))),
            Command::Share(share, to) => {
                let answer = self.set_share(share);
                self.publish();
                drop(to.send(answer));
            }
            Command::Allow(limit_bytes, to) => {
                self.allow(limit_bytes);
                self.publish();
                drop(to.send(Ok(())));
            }
            Command::Detach(to) => match self.detach() {
                Ok(report) => return Next::End(Outcome::Ended(Some((to, report)))),
                Err(refused) => drop(to.send(Err(refused))),
            },
            Command::Gone(why) => return self.gone(why),
            Command::Panicked(why) => return Next::End(Outcome::Panicked(why)),
        }
        Next::Go
    }

    fn tick(&mut self) -> Next {
        if self.faults.is_none() {
            self.serve_again();
        }
        if self.held.record.leaving.is_some() {
            return self.keep_leaving();
        }
        let open = &mut OpenFiles::default();
        self.keep_regions(open);
        self.keep_devices(open);
        failpoint::reached("tick", &self.held.record.name);
        if self.unsaved.is_some() {
            self.save();
        }
        // QEMU itself may be the next to wait for room.
        if !self.waits() {
            self.begin();
        }
        self.keep_small_pages();
        self.notice_reset();
        self.judge_restored();
        if self.waits() {
            self.hold_limit(open);
            return Next::Go;
        }
        // What comes back need not go again.
        let is_idle = self.limiter.is_none() || self.stuck.is_some();
        if let Err(error) = self.held.pager.trim_store(is_idle) {
            tracing::debug!("{}: trimming: {error}", self.held.record.name);
        }
        if self.insight.is_due() {
            self.confirm();
        }
        self.keep_size();
        self.keep_sizes();
        self.hold_limit(open);
        self.write_back_unlimited();
        self.keep_heat();
        self.keep_placing();
        self.keep_compact();
        // Who evicts is told why not.
        let _ = self.note_disks();
        let auto = self.held.record.auto;
        if auto.on && Instant::now() >= self.due {
            self.due = Instant::now() + Duration::from_millis(auto.interval_ms);
            match self.take(u64::MAX, auto.keep_bytes) {
                Ok(report) => self.last = Some(report),
                Err(error) => tracing::debug!("{}: {error}", self.held.record.name),
            }
        }
        Next::Go
    }

    fn reclaim(&mut self, request: ReclaimRequest) -> Answer<ReclaimReport> {
        self.take(request.bytes.unwrap_or(u64::MAX), self.held.record.auto.keep_bytes)
    }

    fn take(&mut self, want_bytes: u64, keep_bytes: u64) -> Answer<ReclaimReport> {
        let began = Instant::now();
        self.keep_devices(&mut OpenFiles::default());
        self.may_take()?;
        let trusted = self.confirm();
        if trusted && self.may_share() {
            return self.take_soft(want_bytes, keep_bytes);
        }
        if self.held.record.backing == Backing::Hugetlb {
            return Err(not_allowed(
                "hugetlb pages cannot be write-protected 4 KiB at a time, so the guest's metadata \
                 cannot be watched: start the VM with --backing thp",
            ));
        }
        if !trusted {
            let why = self.insight.guest().err().unwrap_or_default();
            return Err(not_allowed(format!("the guest is not trusted: {why}")));
        }
        let (taken, stop) = self.pass(want_bytes, keep_bytes)?;
        if taken.bytes > 0 {
            self.save_totals(taken.bytes);
        }
        Ok(report(taken, stop, want_bytes, began.elapsed()))
    }

    /// Takes what is free, again where QEMU did not answer in time.
    fn pass(
        &mut self,
        want_bytes: u64,
        keep_bytes: u64,
    ) -> Answer<(vprobe::Taken, Option<vprobe::Stop>)> {
        let mut before = vprobe::Taken::default();
        for _ in 0..TRIES {
            let (taken, stop) = self.pass_once(want_bytes - before.bytes, keep_bytes)?;
            before = before.and_then(taken);
            // Asked outside of a pass, when nobody waits for what it holds, QEMU has time.
            if !matches!(stop, Some(vprobe::Stop::Unknown)) || !self.confirm() {
                return Ok((before, stop));
            }
            self.keep_devices(&mut OpenFiles::default());
            self.may_take()?;
        }
        Ok((before, Some(vprobe::Stop::Unknown)))
    }

    fn pass_once(
        &mut self,
        want_bytes: u64,
        keep_bytes: u64,
    ) -> Answer<(vprobe::Taken, Option<vprobe::Stop>)> {
        let order = vprobe::Order {
            mode: match self.held.record.mode {
                Mode::Strict => vprobe::Mode::Strict,
                Mode::Release => vprobe::Mode::Release,
            },
            min_order: self.held.record.min_order,
            reserve_bytes: RESERVE_BYTES.max(keep_bytes),
            want_bytes,
            batch_bytes: match self.held.record.backing {
                Backing::Small => BATCH_SMALL_BYTES,
                _ => BATCH_HUGE_BYTES,
            },
        };
        let (pager, mut pulse) = (Arc::clone(&self.held.pager), self.pulse());
        let still_runs = || pulse.beats_at_once();
        let result = match self.insight.guest() {
            Ok(guest) => vprobe::reclaim(&pager, guest, order, &mut self.blocks, still_runs),
            Err(_) => (vprobe::Taken::default(), Some(vprobe::Stop::Unknown)),
        };
        self.end_pulse(pulse);
        Ok(result)
    }

    pub(crate) fn save_totals(&mut self, bytes: u64) {
        self.held.record.totals.reclaimed_bytes += bytes;
        self.save();
    }

    /// Writes the VM's record. What has happened already is not undone where that fails: it is
    /// tried again at each tick.
    pub(crate) fn save(&mut self) {
        let saved = self.held.record.save(&self.held.directory);
        let why = saved.err().map(|error| error.to_string());
        if let Some(why) = why.as_ref().filter(|_| self.unsaved.is_none()) {
            tracing::error!("{}: its record: {why}", self.held.record.name);
        }
        self.unsaved = why;
    }

    /// Changes what is on record of the VM, for who waits for an answer: where that fails nothing
    /// has changed.
    pub(crate) fn put_on_record(&mut self, change: impl FnOnce(&mut Record)) -> Answer<()> {
        let changed = self.held.record.change(&self.held.directory, change);
        changed.map_err(unsaved("the VM's record"))?;
        self.unsaved = None;
        Ok(())
    }

    fn set_auto(&mut self, request: AutoRequest) -> Answer<AutoStatus> {
        request.check()?;
        self.put_on_record(|record| {
            let auto = &mut record.auto;
            auto.on = request.on;
            auto.interval_ms = request.interval_ms.unwrap_or(auto.interval_ms);
            auto.keep_bytes = request.keep_bytes.unwrap_or(auto.keep_bytes);
        })?;
        self.due = Instant::now();
        Ok(status::auto(self))
    }

    /// Blocks that were given back and are still free were not needed.
    fn judge_restored(&mut self) {
        let Ok(guest) = self.insight.guest() else { return };
        let view = self.held.pager.view();
        for block in self.held.restored.try_iter() {
            let now = guest.look(&view).head(block.head);
            if now.is_some_and(|now| now.order >= block.order) {
                let spurious = &self.held.pager.counters.spurious;
                spurious.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        }
    }

    fn evict(&mut self, want_bytes: u64) -> Answer<EvictReport> {
        let began = Instant::now();
        self.look_at_devices();
        self.note_disks()?;
        self.may_evict()?;
        // Also so that its metadata is known right after a restart.
        self.confirm();
        let pinned = self.may_tell_in_flight(&mut OpenFiles::default())?;
        self.put_on_record(|record| record.evicts = true)?;
        self.held.pager.watch_all().map_err(failed("watching the VM's memory"))?;
        self.expect_refills().map_err(failed("the refill threads"))?;
        let (done, in_the_way) = self.evict_by_force(want_bytes, pinned.is_some())?;
        let saved_bytes = done.frames() * FRAME_BYTES;
        let stopped_by = match in_the_way {
            Some(why) => why.to_string(),
            None if saved_bytes >= want_bytes => "the amount asked for was reached".into(),
            None => self.nothing_more(pinned.as_deref()),
        };
        Ok(EvictReport {
            saved_bytes,
            saved_frames: done.frames(),
            abandoned: done.abandoned,
            duration_ns: u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX),
            stopped_by,
        })
    }

    /// Why evicting or bringing back failed, and what to do.
    pub(crate) fn explain(&self, what: Attempt, error: &std::io::Error) -> String {
        let record = &self.held.record;
        let lift = match (record.share, record.limit_bytes) {
            (Some(_), _) => Some(format!("ebb share {} off", record.name)),
            (None, Some(_)) => Some(format!("ebb limit {} off", record.name)),
            (None, None) => None,
        };
        trouble::explain(
            what,
            error,
            &Place { swap: &record.swap, run: &self.held.directory, lift },
        )
    }

    /// Punching a part of a large folio may zero it in place: where the kernel may have made, or
    /// may yet make, large folios that nobody tells, nothing in use is evicted.
    pub(crate) fn may_evict(&self) -> Answer<()> {
        self.may_evict_beside_devices()?;
        let record = &self.held.record;
        if let Some(disk) = record.disks.iter().find(|disk| disk.dma == DmaMode::Strict) {
            return Err(not_allowed(format!(
                "its disk {} has dma=strict: such a device cannot wait for memory in use to come \
                 back, so none of it is evicted; free memory is (reclaim, auto)",
                disk.path.display()
            )));
        }
        if record.disks_used && !self.held.disks.shared.all_used() {
            return Err(not_allowed(
                "QEMU has not connected to its disks again yet, whose rings must stay in memory",
            ));
        }
        match record.backing {
            Backing::Hugetlb => Err(not_allowed("frames in hugetlb pages are not evicted")),
            Backing::Thp if !small_pages::keeps_holes() => Err(not_allowed(
                "before Linux 6.4 the host's kernel may fill what is evicted of huge pages with \
                 zeros: start the VM with --backing small",
            )),
            Backing::Small if !record.small_pages => Err(not_allowed(
                "QEMU could not be told yet to have no huge pages in its RAM; it is tried again",
            )),
            Backing::Small if !record.started && !self.held.pager.minds_large_folios() => {
                Err(not_allowed(
                    "this VM was not started by Ebb, and the host does not tell which of its \
                     memory is in large folios, which cannot be evicted in parts: run ebbd as \
                     root, outside of containers",
                ))
            }
            _ => Ok(()),
        }
    }

    fn detach(&mut self) -> Answer<DetachReport> {
        if !self.held.record.disks.is_empty() {
            return Err(not_allowed(
                "Ebb serves this VM's disks, so it cannot be let go while it runs: power it off",
            ));
        }
        if !self.held.record.growth.is_empty() {
            return Err(not_allowed(
                "Ebb serves this VM's virtio-mem devices, so it cannot be let go while it runs: \
                 power it off",
            ));
        }
        // Its end is put on record once all is back. That needs no new room, unless this does.
        if let Err(refused @ Refused::NoRoom(_)) = self.put_on_record(|_| {}) {
            return Err(refused);
        }
        let began = Instant::now();
        self.give_balloon_back();
        // Else what comes back would wait for what goes.
        self.held.pager.set_marks(u64::MAX, u64::MAX);
        let restored_bytes = self.give_back_all().map_err(|error| {
            self.apply_limit();
            not_allowed(format!("not all memory could be given back, so it stays held: {error}"))
        })?;
        self.all_is_back();
        self.faults = None;
        if let Err(error) = self.held.let_go() {
            if self.held.record.leaving.is_some() {
                self.serve_again();
                return Err(Refused::Failed(format!("{LEAVING}: {error}")));
            }
            self.hold_on();
            return Err(Refused::Failed(format!("it stays held, letting go failed: {error}")));
        }
        let duration_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Ok(DetachReport { restored_bytes, duration_ns })
    }

    /// Lets the VM go once its userfaultfd is closed, whoever closes it.
    fn keep_leaving(&mut self) -> Next {
        if !self.held.is_closed() {
            return Next::Go;
        }
        self.faults = None;
        self.held.part();
        Next::End(Outcome::Ended(None))
    }

    /// Whether anything of its memory may go: what is not there would be lost with a userfaultfd
    /// that is closed late.
    pub(crate) fn is_to_stay(&self) -> Answer<()> {
        match self.held.record.leaving {
            Some(_) => Err(not_allowed(LEAVING)),
            None => Ok(()),
        }
    }

    /// It was to be let go of, and is held as before: what is on record of it has not changed.
    fn hold_on(&mut self) {
        self.serve_again();
        // Nothing is watched any more.
        self.watched.clear();
        let record = &self.held.record;
        let watched = match record.mode == Mode::Strict || record.evicts || record.shares {
            true => self.held.pager.watch_all(),
            false => Ok(()),
        };
        if let Err(error) = watched {
            tracing::error!("{}: watching its memory: {error}", record.name);
        }
        self.save();
        self.apply_limit();
    }

    /// Frames are about to be evicted.
    pub(crate) fn expect_refills(&mut self) -> std::io::Result<()> {
        self.faults.as_mut().map_or(Ok(()), |faults| faults.expect_refills(&self.held))
    }

    /// A guest whose faults nobody serves would wait for ever.
    fn serve_again(&mut self) {
        // Before others take up what these wait for.
        self.faults = None;
        match Serving::start(&self.held, &self.own) {
            Ok(faults) => self.faults = Some(faults),
            Err(error) => tracing::error!("{}: the fault thread: {error}", self.held.record.name),
        }
    }

    fn gone(&mut self, why: std::io::Result<()>) -> Next {
        let name = &self.held.record.name;
        let ended = Life::of_held(&self.held.process);
        let Ok(Some(dead)) = ended else {
            match (why, ended) {
                // Its memory is gone: so will it be.
                (Ok(()), Ok(_)) => {}
                (Err(error), _) | (_, Err(error)) => {
                    tracing::error!("{name}: its faults cannot be read: {error}");
                }
            }
            // Whatever it was, it may be there still.
            std::thread::sleep(TICK);
            self.serve_again();
            return Next::Go;
        };
        tracing::info!("{name}: QEMU {} ended", self.held.record.pid);
        self.faults = None;
        if let Err(error) = self.held.bury(&dead) {
            tracing::error!("{name}: {error}");
        }
        Next::End(Outcome::Ended(None))
    }
}

fn report(
    taken: vprobe::Taken,
    stop: Option<vprobe::Stop>,
    want_bytes: u64,
    took: Duration,
) -> ReclaimReport {
    let stopped_by = match stop {
        Some(stop) => stop.to_string(),
        None if taken.bytes >= want_bytes => "the amount asked for was reached".into(),
        None => format!("nothing more is free above the reserve of {}", Bytes(RESERVE_BYTES)),
    };
    let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    ReclaimReport {
        bytes: taken.bytes,
        blocks: taken.blocks,
        duration_ns: ns(took),
        scan_ns: ns(taken.scan),
        stopped_by,
        skipped: Skipped {
            in_use: taken.in_use,
            already_empty: taken.already_empty,
            cancelled: taken.cancelled,
        },
    }
}
