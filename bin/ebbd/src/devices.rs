//! Who reaches a VM's memory by itself, and what may be taken of it beside that: one answer for
//! all who take. It is looked for at each tick, before each pass and each step of an eviction. A
//! look at the VMM's open descriptors is cheap; QEMU is asked where they changed, and now and then.
//! `docs/devices.md`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_api::{MayTake, ReachStatus, ReachingDevice};
use ebb_sys::process::Process;
use ebb_vm::reach::{self, Device, Kind, Migration, Reach};
use ebb_vm::{Qmp, launch, takeover};
use serde_json::json;

use crate::open_files::OpenFiles;
use crate::problem::{Answer, failed, not_allowed};
use crate::record::Record;
use crate::retry::Retry;
use crate::worker::State;

/// While memory in use may be elsewhere the descriptors are looked at so often.
pub const GLANCE: Duration = Duration::from_millis(20);
/// QEMU is asked so often although its descriptors are the same: for its migration, which needs
/// none before it begins, and for all else.
const MIGRATION_EVERY: Duration = Duration::from_secs(1);
const ALL_EVERY: Duration = Duration::from_secs(10);
/// One that does not answer is asked again after so long, and at most after so long.
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_MOST: Duration = Duration::from_secs(30);

/// A VMM's open descriptors at one time.
pub struct Seen {
    process: Arc<Process>,
    count: Option<u64>,
    links: Vec<(i32, String)>,
}

impl Seen {
    fn now(process: &Arc<Process>) -> io::Result<Seen> {
        let count = process.descriptor_count()?;
        Ok(Seen { process: Arc::clone(process), count, links: process.descriptors()? })
    }

    /// Whether they are the same now, by their number where the kernel tells it: a device that
    /// comes has at least one, for its notifications.
    pub fn holds(&self) -> bool {
        match self.count {
            Some(_) => self.process.descriptor_count().is_ok_and(|now| now == self.count),
            None => self.holds_in_full(),
        }
    }

    fn holds_in_full(&self) -> bool {
        self.is_of(&mut OpenFiles::default())
    }

    fn is_of(&self, open: &mut OpenFiles) -> bool {
        open.of(&self.process).is_ok_and(|now| now == self.links)
    }
}

/// What one VM's worker knows of them.
pub struct Devices {
    process: Option<Arc<Process>>,
    /// Just before QEMU was asked last.
    seen: Option<Arc<Seen>>,
    found: Vec<Device>,
    migration: Migration,
    /// QEMU told all at the last look.
    is_told: bool,
    asked: Option<Instant>,
    asked_migration: Option<Instant>,
    retry: Retry,
    /// What was elsewhere has come back for devices that leave so much to be taken.
    settled: Reach,
    failed: Option<String>,
}

impl Default for Devices {
    fn default() -> Devices {
        Devices {
            process: None,
            seen: None,
            found: Vec::new(),
            migration: Migration::default(),
            is_told: false,
            asked: None,
            asked_migration: None,
            retry: Retry::new(RETRY_FIRST, RETRY_MOST),
            settled: Reach::Everything,
            failed: None,
        }
    }
}

impl Devices {
    /// All that leave less than everything.
    fn all(&self) -> Vec<Device> {
        let mut all = self.found.clone();
        all.extend(self.migration.shared.clone());
        all.extend((!self.is_told).then(Device::unknown));
        all
    }

    /// Whether something is elsewhere that a device may ask for.
    fn owes(&self) -> bool {
        self.is_told && reach::reach(&self.all()) < self.settled
    }

    fn is_due(&self) -> bool {
        let since = |at: Option<Instant>, most| at.is_none_or(|at: Instant| at.elapsed() >= most);
        match self.is_told {
            true => since(self.asked, ALL_EVERY) || self.owes(),
            false => self.retry.is_due(),
        }
    }
}

/// Those of a VM that is about to be held, which may then be taken from.
///
/// # Errors
/// The VMM does not tell, or nothing may be taken: why.
pub fn of_new(process: &Process, qmp: &mut Qmp, own: &[String]) -> Answer<Vec<Device>> {
    let links = process.descriptors().map_err(failed("QEMU's descriptors"))?;
    let mut found = reach::of_descriptors(links.iter().map(|(_, link)| link.as_str()));
    let end = reach::end_of_look();
    found.extend(reach::of_vmm(qmp, own, end).map_err(failed("its devices"))?);
    found.extend(reach::of_migration(qmp, end).map_err(failed("its migration"))?.shared);
    takeover::may_be_held(process.pid(), &found).map_err(not_allowed)?;
    Ok(found)
}

/// The character devices behind which this daemon serves the VM.
fn own_names(record: &Record) -> Vec<String> {
    match record.started {
        true => launch::served_names(record.disks.len(), record.growth.len()),
        false => Vec::new(),
    }
}

/// What may be taken beside `devices`: memory in use, if none is in the way.
///
/// # Errors
/// The one in the way.
pub fn may_evict_beside(devices: &[Device]) -> Answer<()> {
    match reach::narrowest(devices) {
        None => Ok(()),
        Some(device) => Err(not_allowed(format!(
            "memory in use is not evicted because of {device}{}",
            match (device.kind.reach(), device.kind) {
                (Reach::Nothing, _) => "; neither is free memory taken",
                (_, Kind::VhostUser) => {
                    "; free memory is taken (reclaim, auto), and ebb run --disk serves disks beside \
                     a limit"
                }
                _ => "; free memory is taken (reclaim, auto)",
            }
        ))),
    }
}

impl State {
    /// What of this VM's memory may be taken.
    pub(crate) fn reach(&self) -> Reach {
        reach::reach(&self.devices.all())
    }

    /// Whether free memory may be taken.
    pub(crate) fn may_take(&self) -> Answer<()> {
        self.is_to_stay()?;
        let all = self.devices.all();
        let in_the_way =
            reach::narrowest(&all).filter(|found| found.kind.reach() == Reach::Nothing);
        in_the_way.map_or(Ok(()), |device| {
            Err(not_allowed(format!("no memory is taken because of {device}")))
        })
    }

    /// Whether memory in use may be evicted, as far as devices are concerned.
    pub(crate) fn may_evict_beside_devices(&self) -> Answer<()> {
        self.is_to_stay()?;
        may_evict_beside(&self.devices.all())
    }

    /// The VMM's descriptors as they were when it was asked last.
    pub(crate) fn seen_descriptors(&self) -> Option<Arc<Seen>> {
        self.devices.seen.clone()
    }

    /// Whether nobody can have come since the last look.
    pub(crate) fn is_as_seen(&self) -> bool {
        self.devices.seen.as_ref().is_some_and(|seen| seen.holds())
    }

    /// How long the worker may wait until it glances again.
    pub(crate) fn glance_after(&self) -> Option<Duration> {
        self.held.record.evicts.then_some(GLANCE)
    }

    /// Looks, if the descriptors have changed.
    pub(crate) fn glance_at_devices(&mut self) {
        if self.devices.is_told && !self.is_as_seen() {
            self.look_at_devices();
        }
    }

    /// Looks, if the descriptors have changed or it is time to.
    pub(crate) fn keep_devices(&mut self, open: &mut OpenFiles) {
        let same = self.devices.seen.as_ref().is_some_and(|seen| seen.is_of(open));
        if self.devices.is_due() || (self.devices.is_told && !same) {
            self.look_at_devices();
        } else if self.held.record.evicts
            && self.devices.is_told
            // Each question lets touches that wait for room go on.
            && !self.is_halted()
            && self.devices.asked_migration.is_none_or(|asked| asked.elapsed() >= MIGRATION_EVERY)
        {
            self.ask(false);
            self.settle();
        }
    }

    /// Finds out who reaches the memory, and sees to it that nothing is elsewhere that they may
    /// ask for.
    pub(crate) fn look_at_devices(&mut self) {
        self.ask(true);
        self.settle();
    }

    /// QEMU may wait for a vCPU whose fault waits for room, so none does meanwhile.
    fn ask(&mut self, all: bool) {
        let before = self.devices.all();
        let (tell, wait) = self.held.pager.marks();
        self.held.pager.set_marks(u64::MAX, u64::MAX);
        let above = self.held.pager.halts_above();
        self.held.pager.halt_above(u64::MAX);
        let end = reach::end_of_look();
        let told = if all { self.ask_all(end) } else { self.ask_migration(end) };
        self.held.pager.set_marks(tell, wait);
        self.held.pager.halt_above(above);
        let name = &self.held.record.name;
        let devices = &mut self.devices;
        devices.is_told = told.is_ok();
        match told {
            Ok(()) => devices.retry.worked(),
            Err(why) => {
                devices.retry.failed();
                tracing::debug!("{name}: its devices: {why}");
            }
        }
        let after = devices.all();
        for device in after.iter().filter(|device| !before.contains(device)) {
            tracing::warn!("{name}: {} is left to be taken because of {device}", left(device));
        }
        let is_gone = |device: &&Device| !after.contains(device) && device.kind != Kind::Unknown;
        for device in before.iter().filter(is_gone) {
            tracing::info!("{name}: {} is in the way no more", device.name);
        }
    }

    fn ask_all(&mut self, end: Instant) -> Result<(), String> {
        self.devices.asked = Some(Instant::now());
        let text = |error: io::Error| error.to_string();
        let process = match &self.devices.process {
            Some(process) => Arc::clone(process),
            None => Arc::new(Process::open(self.held.record.pid).map_err(text)?),
        };
        // What comes after this is seen at the next glance.
        let seen = Seen::now(&process).map_err(text)?;
        let mut found = reach::of_descriptors(seen.links.iter().map(|(_, link)| link.as_str()));
        self.devices.process = Some(process);
        // Also if QEMU does not answer.
        for device in &found {
            if !self.devices.found.contains(device) {
                self.devices.found.push(device.clone());
            }
        }
        self.reconnect();
        let qmp = self.held.qmp.as_mut().ok_or("its QMP socket does not answer")?;
        let own = own_names(&self.held.record);
        found.extend(reach::of_vmm(qmp, &own, end).map_err(|error| error.to_string())?);
        (self.devices.found, self.devices.seen) = (found, Some(Arc::new(seen)));
        self.ask_migration(end)?;
        // Last: what may be taken does not depend on it.
        self.look_at_plugged(end);
        Ok(())
    }

    fn ask_migration(&mut self, end: Instant) -> Result<(), String> {
        self.devices.asked_migration = Some(Instant::now());
        let qmp = self.held.qmp.as_mut().ok_or("its QMP socket does not answer")?;
        self.devices.migration =
            reach::of_migration(qmp, end).map_err(|error| error.to_string())?;
        Ok(())
    }

    /// Brings back what those who are there now may ask for.
    fn settle(&mut self) {
        if !self.devices.is_told {
            return;
        }
        let reach = self.reach();
        let is_all_there = reach == Reach::FreeOnly && !self.held.record.evicts;
        if is_all_there || reach >= self.devices.settled {
            self.devices.settled = reach;
            return;
        }
        let all = self.devices.all();
        let Some(device) = reach::narrowest(&all) else { return };
        let began = Instant::now();
        // Else what comes back would wait for what goes, and QEMU for a vCPU that waits for room.
        self.held.pager.set_marks(u64::MAX, u64::MAX);
        self.held.pager.halt_above(u64::MAX);
        match device.kind {
            Kind::SharedMigration => self.cancel_migration(),
            _ => self.pause_guest(),
        }
        let back = match reach {
            Reach::Nothing => self.give_back_all(),
            _ => self.held.pager.give_back_in_use(),
        };
        let (name, took) = (&self.held.record.name, began.elapsed());
        match back {
            Ok(bytes) => {
                let back = ebb_units::Bytes(bytes);
                tracing::warn!("{name}: {back} came back for {} in {took:?}", device.name);
                (self.devices.settled, self.devices.failed) = (reach, None);
                self.begin();
            }
            Err(error) => {
                let why = format!(
                    "the guest is stopped until all its memory is back for {}, which fails: {error}",
                    device.name
                );
                if self.devices.failed.as_ref() != Some(&why) {
                    tracing::error!("{name}: {why}");
                }
                self.devices.failed = Some(why);
            }
        }
    }

    /// All was brought back for another reason.
    pub(crate) fn all_is_back(&mut self) {
        (self.devices.settled, self.devices.failed) = (self.reach(), None);
        self.begin();
    }

    /// Whether the guest must not go on yet: a device would find zeros.
    pub(crate) fn must_rest(&self) -> bool {
        // A VMM that does not tell may have one: while anything is elsewhere only a full answer
        // lets the guest go on.
        let counters = &self.held.pager.counters;
        let elsewhere = [&counters.saved_frames, &counters.on_disk_frames];
        let any = elsewhere.iter().any(|count| count.load(Relaxed) > 0);
        self.devices.owes() || (any && self.reach() < self.devices.settled)
    }

    /// Why the guest does not go on.
    pub(crate) fn why_it_rests(&self) -> Option<String> {
        self.devices.failed.clone()
    }

    /// It goes on once all is back ([`State::begin`]), also if another daemon has to see to that.
    fn pause_guest(&mut self) {
        // A `cont` that was not answered in time may have been carried out since.
        if !self.held.record.evicts {
            return;
        }
        let Some(qmp) = &mut self.held.qmp else { return };
        let state = qmp.execute("query-status", json!({}));
        if !state.is_ok_and(|state| state.get("running").is_some_and(|runs| runs == true)) {
            return;
        }
        self.held.record.begin = true;
        self.save();
        let stopped = self.held.qmp.as_mut().map(|qmp| qmp.execute("stop", json!({})));
        if let Some(Err(error)) = stopped {
            tracing::error!("{}: it was not stopped: {error}", self.held.record.name);
        }
    }

    /// What has begun already would hand over memory that is not there.
    fn cancel_migration(&mut self) {
        let name = &self.held.record.name;
        match self.held.qmp.as_mut().map(reach::cancel_migration) {
            Some(Ok(true)) => tracing::error!(
                "{name}: its migration was cancelled, since not all of its memory was there: migrate \
                 again once `ebb status` says that none is elsewhere"
            ),
            Some(Err(error)) => tracing::error!("{name}: its migration goes on: {error}"),
            _ => {}
        }
    }

    /// Who is in the way, and of what.
    pub(crate) fn reach_status(&self) -> ReachStatus {
        let all = self.devices.all();
        ReachStatus {
            may_take: api(reach::reach(&all)),
            devices: { all.iter() }
                .map(|device| ReachingDevice {
                    name: device.name.clone(),
                    may_take: api(device.kind.reach()),
                    why: device.kind.why().into(),
                })
                .collect(),
            migration: self.devices.migration.status.clone(),
        }
    }

    /// Why this mode, of those who reach the memory now.
    pub(crate) fn mode_reason(&self) -> String {
        let (record, all) = (&self.held.record, self.devices.all());
        match reach::narrowest(&all) {
            Some(device) if record.mode_reason == crate::host::NO_DEVICE => {
                format!("{} is taken because of {device}", left(device))
            }
            _ => record.mode_reason.clone(),
        }
    }
}

/// In words, what may be taken beside it.
fn left(device: &Device) -> &'static str {
    match device.kind.reach() {
        Reach::Nothing => "nothing",
        Reach::FreeOnly => "free memory only",
        Reach::Everything => "all memory",
    }
}

fn api(reach: Reach) -> MayTake {
    match reach {
        Reach::Nothing => MayTake::Nothing,
        Reach::FreeOnly => MayTake::FreeOnly,
        Reach::Everything => MayTake::Everything,
    }
}
