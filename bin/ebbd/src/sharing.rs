//! What a VM's worker does with a guest that shares its allocator: HyperAlloc.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Release};
use std::time::{Duration, Instant};

use ebb_api::{
    FaultTimes, Fragmentation, KindBytes, Mechanism, OnViolation, ReclaimReport, SharingStatus,
    Skipped,
};
use ebb_inspect::LlfreeZone;
use ebb_reclaim::hyperalloc::{How, HyperAlloc, KindUsage, Stop, Taken};
use ebb_units::{Bytes, FRAMES_PER_HUGE, HUGE_BYTES};
use serde_json::json;

use crate::compaction::Compaction;
use crate::open_files::OpenFiles;
use crate::problem::{Answer, failed, not_allowed};
use crate::reserve;
use crate::worker::{Command, State};

/// A guest that has not tried to free memory by then does not do it.
const PURGE_TIMEOUT: Duration = Duration::from_secs(10);
const PURGE_POLL: Duration = Duration::from_millis(10);
/// It is asked so often, for twice as much each time: what it frees is in pieces.
const PURGES_MAX: u32 = 5;
/// What a guest can spare is taken in no smaller pieces: it asks for some all the time.
const PIECE_HUGE: u64 = 4;
/// What a size lacks is looked for so often.
const MISSING_EVERY: Duration = Duration::from_secs(1);

/// The shared allocator of one VM, and what came of it.
#[derive(Default)]
pub struct Sharing {
    /// While there is one.
    shared: Option<Arc<HyperAlloc>>,
    /// Why there is none, though the guest announces one.
    refused: Option<String>,
    /// A violation was told and is not looked at yet.
    told: Arc<AtomicBool>,
    /// Why the VM was stopped.
    stopped: Option<String>,
    looked: Option<Instant>,
}

impl State {
    /// Whether the trusted guest says that it shares its allocator.
    pub(crate) fn may_share(&self) -> bool {
        self.insight.guest().is_ok_and(|guest| !guest.llfree().is_empty())
    }

    /// The shared allocator of a guest that was just confirmed; from now on it is watched,
    /// also by the daemons after this one.
    pub(crate) fn share(&mut self) -> Answer<Arc<HyperAlloc>> {
        self.may_take()?;
        if let Some(shared) = &self.sharing.shared {
            return Ok(Arc::clone(shared));
        }
        let zones = self.insight.guest().map(|guest| guest.llfree().to_vec());
        let zones = zones.map_err(|why| not_allowed(format!("the guest is not trusted: {why}")))?;
        let shared = self.share_with(&zones);
        self.sharing.refused = shared.as_ref().err().map(ToString::to_string);
        shared
    }

    fn share_with(&mut self, zones: &[LlfreeZone]) -> Answer<Arc<HyperAlloc>> {
        if zones.is_empty() {
            return Err(not_allowed(
                "the guest's kernel does not share its allocator: it needs one with LLFree \
                 (docs/hyperalloc.md)",
            ));
        }
        self.put_on_record(|record| record.shares = true)?;
        let pager = &self.held.pager;
        pager.watch_all().map_err(failed("watching the VM's memory"))?;
        let headers: Vec<_> = zones.iter().map(|zone| zone.header).collect();
        let shared = HyperAlloc::attach(pager, &headers).map_err(not_allowed)?;
        let (told, own) = (Arc::clone(&self.sharing.told), self.own.clone());
        shared.on_violation(move || {
            if !told.swap(true, AcqRel) {
                // A worker that is gone stops nothing.
                let _ = own.send(Command::Violation);
            }
        });
        self.sharing.shared = Some(Arc::clone(&shared));
        Ok(shared)
    }

    /// The shared allocator, where there is one now.
    pub(crate) fn shared(&self) -> Option<Arc<HyperAlloc>> {
        self.sharing.shared.clone()
    }

    /// Takes the sharing up again after a restart of the daemon or the guest.
    pub(crate) fn share_again(&mut self) {
        if self.held.record.shares && self.sharing.shared.is_none() && self.may_share() {
            match self.share() {
                // Of what it began with, which QEMU may not have told yet.
                Ok(_) => self.hold_size_of_known(),
                Err(why) => tracing::debug!("{}: {why}", self.held.record.name),
            }
        }
    }

    fn hold_size_of_known(&mut self) {
        if self.seen().is_none() {
            self.glance_at_offers();
        }
        self.hold_size();
    }

    /// The guest was reset: what was taken from it by its allocator is memory like any other.
    pub(crate) fn unshare(&mut self) {
        self.compaction = Compaction::default();
        if let Some(shared) = self.sharing.shared.take() {
            shared.forget(&self.held.pager);
        } else if self.held.record.shares {
            self.held.pager.soften_all();
        }
    }

    /// Brings everything back, what was taken for good included.
    pub(crate) fn give_back_all(&mut self) -> std::io::Result<u64> {
        let pager = &self.held.pager;
        let bytes = match &self.sharing.shared {
            Some(shared) => shared.give_back_all(pager)?,
            None => pager.give_back_all()?,
        };
        self.sharing.shared = None;
        Ok(bytes)
    }

    /// Takes free huge frames until the guest touches them.
    pub(crate) fn take_soft(&mut self, want_bytes: u64, keep_bytes: u64) -> Answer<ReclaimReport> {
        let began = Instant::now();
        self.keep_devices(&mut OpenFiles::default());
        let shared = self.share()?;
        let (want, keep) = (want_bytes.div_ceil(HUGE_BYTES), keep_bytes.div_ceil(HUGE_BYTES));
        let (taken, stop) = self.take_shared(&shared, How::Soft, want, keep);
        let stopped_by = match stop {
            Some(stop) => stop.to_string(),
            None if taken.huge_frames >= want => "the amount asked for was reached".into(),
            None => "nothing more is free in whole huge frames".into(),
        };
        Ok(ReclaimReport {
            bytes: taken.emptied_bytes,
            blocks: taken.huge_frames - taken.already_empty,
            duration_ns: ns(began.elapsed()),
            scan_ns: ns(taken.scan),
            stopped_by,
            skipped: Skipped {
                in_use: taken.in_use,
                already_empty: taken.already_empty,
                cancelled: taken.busy,
            },
        })
    }

    /// Under a limit: what is free goes before anything in use, and nothing of it is saved.
    pub(crate) fn take_what_is_free(&mut self) {
        if self.may_share()
            && let Ok(shared) = self.share()
        {
            let (_, stop) = self.take_shared(&shared, How::Soft, u64::MAX, 0);
            if let Some(stop) = stop {
                tracing::debug!("{}: {stop}", self.held.record.name);
            }
        }
    }

    fn take_shared(
        &mut self,
        shared: &HyperAlloc,
        how: How,
        want: u64,
        keep: u64,
    ) -> (Taken, Option<Stop>) {
        let (pager, mut pulse) = (Arc::clone(&self.held.pager), self.pulse());
        let result = shared.reclaim(&pager, how, want, keep, || pulse.beats());
        self.end_pulse(pulse);
        if result.0.emptied_bytes > 0 {
            self.save_totals(result.0.emptied_bytes);
        }
        result
    }

    /// Changes what the guest has of what the VM began with to what is on record.
    pub(crate) fn resize_shared(&mut self) -> Answer<Shrunk> {
        let shared = self.share()?;
        self.sharing.stopped = None;
        self.reserve.begin_again();
        let mut resize = Resize::new(&shared, self.wanted_hard());
        resize.taken.returned = shared.give(&self.held.pager, resize.surplus());
        let stopped_by = self.shrink(&mut resize);
        Ok(Shrunk {
            taken_bytes: resize.taken.huge_frames * HUGE_BYTES,
            emptied_bytes: resize.taken.emptied_bytes,
            returned_bytes: resize.taken.returned * HUGE_BYTES,
            purges: resize.purges,
            stopped_by,
        })
    }

    /// Huge frames that the guest is not to have.
    fn wanted_hard(&self) -> u64 {
        let initial_bytes = self.initial_bytes();
        let size = self.held.record.size_bytes.unwrap_or(initial_bytes);
        initial_bytes.saturating_sub(size).div_ceil(HUGE_BYTES)
    }

    /// The same in bytes.
    pub(crate) fn wanted_hard_bytes(&self) -> u64 {
        self.wanted_hard() * HUGE_BYTES
    }

    /// What it has not.
    pub(crate) fn hard_bytes(&self) -> u64 {
        self.sharing.shared.as_ref().map_or(0, |shared| shared.counts().hard_bytes)
    }

    /// Takes what the guest can spare, has it free its caches, and takes again; why it ended.
    fn shrink(&mut self, resize: &mut Resize<'_>) -> String {
        loop {
            let missing = resize.missing();
            if missing == 0 {
                return "the size asked for was reached".into();
            }
            let want = missing.min(self.spare_huge(resize.shared));
            if want < missing.min(PIECE_HUGE) {
                return self.what_it_needs(resize);
            }
            let (taken, stop) = self.take_shared(resize.shared, How::Hard, want, 0);
            resize.taken.add(taken);
            if let Some(stop) = stop {
                return stop.to_string();
            }
            let left = want.saturating_sub(taken.huge_frames);
            if left > 0 && resize.purges == PURGES_MAX {
                return resize.what_is_in_the_way();
            }
            if left > 0 {
                resize.shared.ask_purge((left * FRAMES_PER_HUGE) << resize.purges);
                resize.purges += 1;
                if !self.wait_for_purge(resize.shared) {
                    return format!(
                        "the guest does not answer when it is asked to free its caches; {}",
                        resize.what_is_in_the_way()
                    );
                }
            }
        }
    }

    fn what_it_needs(&self, resize: &Resize<'_>) -> String {
        if self.insight.guest().is_err() {
            return "the guest is not trusted, so nothing more is taken from it".into();
        }
        let used = Bytes(resize.shared.usage().used_bytes());
        reserve::in_the_way(used, Bytes(resize.missing() * HUGE_BYTES))
    }

    /// Waits until the guest has tried; `false`: it did not in time, or was reset.
    fn wait_for_purge(&mut self, shared: &HyperAlloc) -> bool {
        let end = Instant::now() + PURGE_TIMEOUT;
        while !shared.has_purged() {
            if Instant::now() > end || !shared.is_there() {
                return false;
            }
            self.hold_limit(&mut OpenFiles::default());
            std::thread::sleep(PURGE_POLL);
        }
        true
    }

    /// Takes what the size on record lacks, or returns what is too much.
    pub(crate) fn hold_size(&mut self) {
        let Some(shared) = self.sharing.shared.clone().filter(|_| self.may_take().is_ok()) else {
            return;
        };
        self.sharing.looked = Some(Instant::now());
        self.relieve(&shared);
        let resize = Resize::new(&shared, self.wanted_hard());
        if resize.missing() > 0 && self.reserve.may_look() && self.confirm() {
            self.take_missing(&resize);
        } else if resize.surplus() > 0 {
            shared.give(&self.held.pager, resize.surplus());
        }
    }

    fn take_missing(&mut self, resize: &Resize<'_>) {
        let want = resize.missing().min(self.spare_huge(resize.shared));
        let stopped_by = if want < resize.missing().min(PIECE_HUGE) {
            self.what_it_needs(resize)
        } else {
            let (_, stop) = self.take_shared(resize.shared, How::Hard, want, 0);
            stop.map_or_else(|| resize.what_is_in_the_way(), |stop| stop.to_string())
        };
        self.note_word(stopped_by);
    }

    /// The same now and then.
    pub(crate) fn keep_size(&mut self) {
        if self.sharing.looked.is_none_or(|looked| looked.elapsed() >= MISSING_EVERY) {
            self.hold_size();
        }
    }

    /// The guest touched what it is not to have.
    pub(crate) fn violated(&mut self) {
        self.sharing.told.store(false, Release);
        self.held.growth.look();
        if self.held.record.on_violation != OnViolation::Stop || self.sharing.stopped.is_some() {
            return;
        }
        self.reconnect();
        let stopped = self.held.qmp.as_mut().map(|qmp| qmp.execute("stop", json!({})));
        let why = match stopped {
            Some(Ok(_)) => {
                "the guest touched memory that was taken from it; QMP `cont` has it go on"
            }
            _ => "the guest touched memory that was taken from it, and QEMU did not obey `stop`",
        };
        tracing::error!("{}: stopped: {why}", self.held.record.name);
        self.sharing.stopped = Some(why.into());
    }

    /// How free memory is found, and why so.
    pub(crate) fn mechanism(&self) -> (Mechanism, String) {
        match (self.insight.guest(), &self.sharing.refused) {
            (Err(why), _) => (Mechanism::None, format!("the guest is not trusted: {why}")),
            (Ok(guest), _) if guest.llfree().is_empty() => (
                Mechanism::VProbe,
                "its kernel has a buddy allocator, whose metadata is known".into(),
            ),
            (Ok(_), Some(why)) => (Mechanism::None, why.clone()),
            (Ok(_), None) => (Mechanism::HyperAlloc, "its kernel shares its allocator".into()),
        }
    }

    /// What is done by the shared allocator.
    pub(crate) fn sharing_status(&self) -> SharingStatus {
        let shared = self.sharing.shared.as_deref();
        let counts = shared.map(HyperAlloc::counts).unwrap_or_default();
        let percentile = |percent| shared?.install_times().percentile_ns(percent);
        SharingStatus {
            size_bytes: self.held.record.size_bytes,
            hard_bytes: counts.hard_bytes,
            soft_bytes: counts.soft_bytes,
            installs: counts.installs,
            install_ns: FaultTimes { p50: percentile(50), p99: percentile(99) },
            violations: counts.violations,
            on_violation: self.held.record.on_violation,
            stopped: self.sharing.stopped.clone(),
            fragmentation: shared.map(fragmentation),
        }
    }
}

/// What a change of the size did in the shared allocator.
#[derive(Default)]
pub struct Shrunk {
    /// Taken from the guest.
    pub taken_bytes: u64,
    /// Of that, what had memory of the host's.
    pub emptied_bytes: u64,
    /// Returned to the guest.
    pub returned_bytes: u64,
    /// How often it was asked to free its caches.
    pub purges: u32,
    /// Why it went no further, in words.
    pub stopped_by: String,
}

/// On the way to a size.
struct Resize<'a> {
    shared: &'a HyperAlloc,
    wanted_hard: u64,
    purges: u32,
    taken: Moved,
}

#[derive(Default)]
struct Moved {
    huge_frames: u64,
    emptied_bytes: u64,
    returned: u64,
}

impl Moved {
    fn add(&mut self, taken: Taken) {
        self.huge_frames += taken.huge_frames;
        self.emptied_bytes += taken.emptied_bytes;
    }
}

impl Resize<'_> {
    fn new(shared: &HyperAlloc, wanted_hard: u64) -> Resize<'_> {
        Resize { shared, wanted_hard, purges: 0, taken: Moved::default() }
    }

    fn hard(&self) -> u64 {
        self.shared.counts().hard_bytes / HUGE_BYTES
    }

    fn missing(&self) -> u64 {
        self.wanted_hard.saturating_sub(self.hard())
    }

    fn surplus(&self) -> u64 {
        self.hard().saturating_sub(self.wanted_hard)
    }

    fn what_is_in_the_way(&self) -> String {
        let all = fragmentation(self.shared);
        let kinds = [all.unmovable, all.movable, all.huge];
        let [huge, used] = [|kind: &KindBytes| kind.huge_bytes, |kind: &KindBytes| kind.used_bytes]
            .map(|bytes| Bytes(kinds.iter().map(bytes).sum()));
        format!(
            "{} more are not free in whole huge frames: {used} are in use, in {huge} of them",
            Bytes(self.missing() * HUGE_BYTES)
        )
    }
}

fn fragmentation(shared: &HyperAlloc) -> Fragmentation {
    let usage = shared.usage();
    let bytes =
        |kind: KindUsage| KindBytes { huge_bytes: kind.huge_bytes, used_bytes: kind.used_bytes };
    Fragmentation {
        unmovable: bytes(usage.unmovable),
        movable: bytes(usage.movable),
        huge: bytes(usage.huge),
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
