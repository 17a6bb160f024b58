//! Which devices reach a VM's memory by themselves, and what may be reclaimed or evicted beside
//! them: one answer for all who do so. The worker looks at each tick, before each pass and before
//! each step of an eviction. A look at the VMM's open descriptors is cheap; QEMU is asked when they
//! changed, and now and then. `docs/devices.md`.

pub mod plugged;
#[cfg(test)]
mod tests;
pub mod unplugged;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_api::{MayTake, ReachStatus, ReachingDevice};
use ebb_pager::OpenGate;
use ebb_passthrough::Covers;
use ebb_sys::process::Process;
use ebb_units::Bytes;
use ebb_vm::layout::Added;
use ebb_vm::reach::{self, DeviceKind, MemoryUser, Reach};
use ebb_vm::{Qmp, launch, takeover};

use self::unplugged::Unplugged;
use super::context::VmContext;
use super::passed_through;
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::model::record::Record;
use crate::support::open_files::{Descriptors, OpenFiles};
use crate::support::retry::Retry;
use crate::system::host_facts::NO_DEVICE;

/// Time between two looks at the descriptors while memory in use may be evicted.
pub const GLANCE: Duration = Duration::from_millis(20);
/// Time between two questions to QEMU about its migration while its descriptors stay the same: a
/// migration needs no descriptor before it begins.
const MIGRATION_EVERY: Duration = Duration::from_secs(1);
/// Time between two questions to QEMU about everything while its descriptors stay the same.
const ALL_EVERY: Duration = Duration::from_secs(10);
/// First pause before a QEMU that did not answer is asked again.
const RETRY_FIRST: Duration = Duration::from_millis(200);
/// Longest pause before a QEMU that did not answer is asked again.
const RETRY_MOST: Duration = Duration::from_secs(30);

/// The controller that keeps up to date what the context knows of the devices, and sees to it that
/// what they may ask for comes back.
pub struct Devices {
    process: Option<Arc<Process>>,
    asked: Option<Instant>,
    asked_migration: Option<Instant>,
    retry: Retry,
    /// The reach for which all memory that devices may ask for has come back.
    settled: Reach,
    /// Why that memory has not all come back.
    failed: Option<String>,
    /// Where the VMM has the files of its RAM.
    unplugged: Unplugged,
    /// Memory that was added after the VM was attached, as QEMU last reported it.
    plugged: Vec<Added>,
}

impl Default for Devices {
    fn default() -> Devices {
        Devices {
            process: None,
            asked: None,
            asked_migration: None,
            retry: Retry::new(RETRY_FIRST, RETRY_MOST),
            settled: Reach::Everything,
            failed: None,
            unplugged: Unplugged::default(),
            plugged: Vec::new(),
        }
    }
}

/// Devices that leave less memory to reclaim or evict than before: what they may ask for must come
/// back. No fault waits for room until the next turn of the limit.
pub struct Narrowed {
    /// What the devices leave.
    pub reach: Reach,
    /// The device that leaves least.
    device: MemoryUser,
    began: Instant,
}

impl Devices {
    /// Returns how long the worker may wait until it glances again.
    pub fn glance_after(&self, cx: &VmContext) -> Option<Duration> {
        cx.record.evicts.then_some(GLANCE)
    }

    /// Looks, if the descriptors have changed.
    pub fn glance(&mut self, cx: &mut VmContext) -> Option<Narrowed> {
        if cx.reaching.is_complete && !cx.reaching.is_unchanged() { self.look(cx) } else { None }
    }

    /// Looks, if the descriptors have changed or a look is due.
    pub fn keep(&mut self, cx: &mut VmContext, open: &mut OpenFiles) -> Option<Narrowed> {
        let same = cx.reaching.descriptors.as_ref().is_some_and(|seen| seen.is_of(open));
        if self.is_due(cx) || (cx.reaching.is_complete && !same) {
            return self.look(cx);
        }
        // Each question lets touches that wait for room go on.
        let shares = cx.record.shares || cx.guest.shares_allocator();
        let minds = cx.record.evicts || shares;
        let asks = minds && cx.reaching.is_complete && !cx.is_halted();
        if asks && self.asked_migration.is_none_or(|asked| asked.elapsed() >= MIGRATION_EVERY) {
            self.ask(cx, false);
            return self.narrowed(cx);
        }
        None
    }

    /// Finds out which devices reach the memory, and whether they may ask for non-resident content.
    pub fn look(&mut self, cx: &mut VmContext) -> Option<Narrowed> {
        self.ask(cx, true);
        self.narrowed(cx)
    }

    fn is_due(&self, cx: &VmContext) -> bool {
        let since = |at: Option<Instant>, most| at.is_none_or(|at: Instant| at.elapsed() >= most);
        match cx.reaching.is_complete {
            true => since(self.asked, ALL_EVERY) || self.owes(cx),
            false => self.retry.is_due(),
        }
    }

    /// Whether a device may ask for content that has not come back.
    fn owes(&self, cx: &VmContext) -> bool {
        cx.reaching.is_complete && cx.reaching.reach() < self.settled
    }

    fn ask(&mut self, cx: &mut VmContext, all: bool) {
        let before = cx.reaching.all();
        let gate = OpenGate::for_touches(cx.pager.room());
        let end = reach::end_of_look();
        let answer = if all { self.ask_all(cx, end) } else { self.ask_migration(cx, end) };
        drop(gate);
        cx.reaching.is_complete = answer.is_ok();
        match answer {
            Ok(()) => self.retry.worked(),
            Err(why) => {
                self.retry.failed();
                tracing::debug!("its devices: {why}");
            }
        }
        tell(&before, &cx.reaching.all());
    }

    fn ask_all(&mut self, cx: &mut VmContext, end: Instant) -> Result<(), String> {
        self.asked = Some(Instant::now());
        let text = |error: io::Error| error.to_string();
        let process = match &self.process {
            Some(process) => Arc::clone(process),
            None => Arc::new(Process::open(cx.record.pid).map_err(text)?),
        };
        // Descriptors that come after this are seen at the next glance.
        let seen = Descriptors::now(&process).map_err(text)?;
        let mut found = reach::of_descriptors(seen.links());
        let covers = passed_through::keep(cx, &process, seen.all());
        self.process = Some(process);
        if covers == Covers::All {
            passed_through::in_pieces(&mut found);
        }
        // These count even if QEMU does not answer, one of each kind.
        for device in &found {
            if !cx.reaching.found.iter().any(|known| known.kind == device.kind) {
                cx.reaching.found.push(device.clone());
            }
        }
        cx.qmp.reconnect();
        let qmp = cx.qmp.socket().ok_or("its QMP socket does not answer")?;
        let served_names = own_names(&cx.record);
        found.extend(reach::of_vmm(qmp, &served_names, end).map_err(|error| error.to_string())?);
        if covers == Covers::All {
            passed_through::in_pieces(&mut found);
        }
        (cx.reaching.found, cx.reaching.descriptors) = (found, Some(Arc::new(seen)));
        self.ask_migration(cx, end)?;
        // Last, because what may be reclaimed or evicted does not depend on it.
        plugged::look(cx, &mut self.plugged, end);
        Ok(())
    }

    fn ask_migration(&mut self, cx: &mut VmContext, end: Instant) -> Result<(), String> {
        self.asked_migration = Some(Instant::now());
        let qmp = cx.qmp.socket().ok_or("its QMP socket does not answer")?;
        cx.reaching.migration = reach::of_migration(qmp, end).map_err(|error| error.to_string())?;
        Ok(())
    }

    /// Returns what must come back for the devices that are there now. Until [`Devices::settle`]
    /// the guest is stopped, or its migration is cancelled.
    fn narrowed(&mut self, cx: &mut VmContext) -> Option<Narrowed> {
        if !cx.reaching.is_complete {
            return None;
        }
        let reach = cx.reaching.reach();
        let is_all_there = reach == Reach::FreeOnly && !cx.record.evicts;
        if is_all_there || reach >= self.settled {
            self.settled = reach;
            return None;
        }
        let all = cx.reaching.all();
        let device = reach::narrowest(&all)?.clone();
        let began = Instant::now();
        // Else what comes back would wait for what is evicted, and QEMU for a vCPU that waits for
        // room.
        cx.pager.room().lift();
        match device.kind {
            DeviceKind::SharedMigration => cancel_migration(cx),
            _ => pause_guest(cx),
        }
        Some(Narrowed { reach, device, began })
    }

    /// Notes whether all memory came back that devices may ask for: its bytes, or the error.
    pub fn settle(&mut self, narrowed: &Narrowed, back: io::Result<u64>) {
        let device = &narrowed.device.name;
        match back {
            Ok(bytes) => {
                let (back, took) = (Bytes(bytes), narrowed.began.elapsed());
                tracing::warn!("its devices: {back} came back for {device} in {took:?}");
                (self.settled, self.failed) = (narrowed.reach, None);
            }
            Err(error) => {
                let why = format!(
                    "the guest is stopped until all its memory is back for {device}, but not \
                     all comes back: {error}"
                );
                if self.failed.as_ref() != Some(&why) {
                    tracing::error!("its devices: {why}");
                }
                self.failed = Some(why);
            }
        }
    }

    /// Notes that all memory was brought back for another reason.
    pub fn all_is_back(&mut self, cx: &VmContext) {
        (self.settled, self.failed) = (cx.reaching.reach(), None);
    }

    /// Whether the guest must not go on yet, because a device would find zeros.
    pub fn must_stay_stopped(&self, cx: &VmContext) -> bool {
        // A VMM that does not tell may have such a device: while anything is evicted, only a full
        // answer lets the guest go on.
        let counters = &cx.pager.counters();
        let evicted = [&counters.saved_frames, &counters.on_disk_frames];
        let any = evicted.iter().any(|count| count.load(Relaxed) > 0);
        self.owes(cx) || (any && cx.reaching.reach() < self.settled)
    }

    /// Returns why the guest does not go on.
    pub fn why_stopped(&self) -> Option<String> {
        self.failed.clone()
    }

    /// Looks whether the VMM still has all of its memory, if it has closed a descriptor of it.
    pub fn glance_at_regions(&mut self, cx: &mut VmContext) {
        let same = self.unplugged.is_unchanged(&cx.process, cx.pager.ram());
        if !same.unwrap_or(false) {
            self.keep_regions(cx, &mut OpenFiles::default());
        }
    }

    /// Looks whether the VMM still has all of its memory, and drops what it has unplugged. That may
    /// take long, so the VMM's open files are listed anew afterwards.
    pub fn keep_regions(&mut self, cx: &mut VmContext, open: &mut OpenFiles) {
        self.unplugged.keep(cx, open);
    }

    /// Returns what the operator should know of memory that was added later.
    pub fn plugged_warning(&self) -> Option<String> {
        plugged::warning(&self.plugged)
    }

    /// Returns which devices are in the way, and of what.
    pub fn status(&self, cx: &VmContext) -> ReachStatus {
        let all = cx.reaching.all();
        ReachStatus {
            may_take: api(reach::reach(&all)),
            devices: { all.iter() }
                .map(|device| ReachingDevice {
                    name: device.name.clone(),
                    may_take: api(device.kind.reach()),
                    why: device.kind.why().into(),
                })
                .collect(),
            migration: cx.reaching.migration.status.clone(),
        }
    }

    /// Returns why the VM is in its mode, considering the devices that reach the memory now.
    pub fn mode_reason(&self, cx: &VmContext) -> String {
        let all = cx.reaching.all();
        match reach::narrowest(&all) {
            Some(device) if cx.record.mode_reason == NO_DEVICE => {
                format!("{} because of {device}", left(device))
            }
            _ => cx.record.mode_reason.clone(),
        }
    }
}

/// Returns the devices of a VM that is about to be attached. `is_held`: its passed-through
/// devices are held, so their memory will be mapped in pieces.
///
/// # Errors
/// The VMM does not tell, or nothing may be reclaimed beside its devices: why.
pub fn of_new(
    process: &Process,
    qmp: &mut Qmp,
    (served_names, is_held): (&[String], bool),
) -> Answer<Vec<MemoryUser>> {
    let links = process.descriptors().map_err(failed("QEMU's descriptors"))?;
    let mut found = reach::of_descriptors(links.iter().map(|(_, link)| link.as_str()));
    let end = reach::end_of_look();
    found.extend(reach::of_vmm(qmp, served_names, end).map_err(failed("its devices"))?);
    if is_held {
        passed_through::in_pieces(&mut found);
    }
    found.extend(reach::of_migration(qmp, end).map_err(failed("its migration"))?.shared);
    takeover::may_be_managed(process.pid(), &found).map_err(not_allowed)?;
    Ok(found)
}

/// Returns the names of the character devices behind which Ebb serves the VM.
fn own_names(record: &Record) -> Vec<String> {
    match record.started {
        true => launch::served_names(record.disks.len(), record.growth.len()),
        false => Vec::new(),
    }
}

/// Stops the guest. It goes on once all is back, even if only the next process brings that about.
fn pause_guest(cx: &mut VmContext) {
    // An earlier `cont` that was not answered in time may have been carried out since.
    if cx.record.evicts {
        cx.stop_guest();
    }
}

/// Cancels a migration: one that has begun would hand over memory that is not resident.
fn cancel_migration(cx: &mut VmContext) {
    let cancelled = cx.qmp.socket().map(reach::cancel_migration);
    match cancelled {
        Some(Ok(true)) => tracing::error!(
            "its migration was cancelled, because not all of its memory was resident: \
             migrate again once `ebb status` says that nothing is evicted"
        ),
        Some(Err(error)) => tracing::error!("its migration goes on: {error}"),
        _ => {}
    }
}

/// Logs in a line each what restricts Ebb now and did not before, and what no longer does. The VMM
/// chooses names, and how many there are.
fn tell(before: &[MemoryUser], after: &[MemoryUser]) {
    let missing = |of: &[MemoryUser], from: &[MemoryUser]| -> Vec<MemoryUser> {
        of.iter().filter(|device| !from.contains(device)).cloned().collect()
    };
    let more = |count: usize| match count {
        1 => String::new(),
        count => format!(" (and {} more)", count - 1),
    };
    let new = missing(after, before);
    if let Some(device) = reach::narrowest(&new) {
        tracing::warn!("its devices: {} because of {device}{}", left(device), more(new.len()));
    }
    let mut gone = missing(before, after);
    gone.retain(|device| device.kind != DeviceKind::Unknown);
    if let Some(device) = gone.first() {
        let more = more(gone.len());
        tracing::info!("its devices: {} no longer restricts Ebb{more}", device.name);
    }
}

/// Returns in words what may be reclaimed or evicted beside the device.
fn left(device: &MemoryUser) -> &'static str {
    match device.kind.reach() {
        Reach::Nothing => "nothing is reclaimed or evicted",
        Reach::FreeOnly => "only free memory is reclaimed",
        Reach::Everything => "everything is reclaimed or evicted",
    }
}

fn api(reach: Reach) -> MayTake {
    match reach {
        Reach::Nothing => MayTake::Nothing,
        Reach::FreeOnly => MayTake::FreeOnly,
        Reach::Everything => MayTake::Everything,
    }
}
