//! All VMs of the daemon by name: their listings, and who may have a name and its directory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ebb_api::{Calibration, VmName, advice};
use ebb_store::Table;

use super::events::{EventLog, News};
use super::history::HistoryKeeper;
use super::jobs::Jobs;
use super::listing::{Listing, Stage};
use super::pilot::{PilotRecord, PilotState};
use super::pool::PoolRecord;
use super::swap_dir::SwapDir;
use super::vm_process::VmProcess;
use crate::model::api_error::{Answer, ApiError, failed, not_allowed};
use crate::model::figures::VmFigures;
use crate::model::record::Record;
use crate::model::site::Site;
use crate::model::task::{Task, Work};
use crate::support::life::Life;
use crate::system::calibration::Calibrated;
use crate::system::{cgroup, remains, starting};

/// Number of VMs for which the daemon remembers why they ended.
const ENDED_MAX: usize = 64;

/// The VMs by name. `None`: a VM that is just being attached or started, or whose record cannot be
/// read.
pub type Vms = BTreeMap<VmName, Option<Arc<Listing>>>;

/// The daemon's state.
#[derive(Clone)]
pub struct Daemon {
    site: Site,
    swap_dir: SwapDir,
    vms: Arc<Mutex<Vms>>,
    /// The thread that clears away what is on no record, at the start.
    clearing: Arc<Mutex<Option<JoinHandle<()>>>>,
    /// Why VMs ended, for those that did not end by themselves.
    ended: Arc<Mutex<BTreeMap<VmName, String>>>,
    /// The pool.
    pool: Arc<PoolRecord>,
    /// The pilot's settings.
    pilot_record: Arc<PilotRecord>,
    /// What the pilot saw and decided.
    pilot: Arc<PilotState>,
    /// Measured speed of this host's tiers.
    calibrated: Arc<Calibrated>,
    /// What the host and its VMs were like.
    history: Arc<HistoryKeeper>,
    /// The table in which swap files tell each other what they take; none: there is no room for it.
    table: Option<Arc<Table>>,
    /// Whether the keys of swap files may be on a disk.
    keys_on_disk: bool,
    /// What happens to VMs.
    events: Arc<EventLog>,
    /// Long operations.
    jobs: Arc<Jobs>,
}

/// What all VMs of a daemon share.
pub struct SharedByVms {
    /// See [`Daemon`].
    pub pool: Arc<PoolRecord>,
    /// See [`Daemon`].
    pub pilot_record: Arc<PilotRecord>,
    /// See [`Daemon`].
    pub calibrated: Arc<Calibrated>,
    /// See [`Daemon`].
    pub table: Option<Arc<Table>>,
}

impl Daemon {
    /// A daemon for a run directory that nobody else uses.
    pub fn new(site: Site, swap_dir: SwapDir, shared: SharedByVms, keys_on_disk: bool) -> Daemon {
        let SharedByVms { pool, pilot_record, calibrated, table } = shared;
        let (vms, clearing, ended) = (Arc::default(), Arc::default(), Arc::default());
        let events = Arc::<EventLog>::default();
        let (history, jobs) = (HistoryKeeper::new(&site.log_dir), Jobs::new(&events));
        Daemon {
            site,
            swap_dir,
            vms,
            clearing,
            ended,
            pool,
            pilot_record,
            pilot: Arc::new(PilotState::new(&events)),
            calibrated,
            history,
            table,
            keys_on_disk,
            events,
            jobs,
        }
    }

    /// What happens to VMs.
    pub fn events(&self) -> &Arc<EventLog> {
        &self.events
    }

    /// Long operations.
    pub fn jobs(&self) -> &Arc<Jobs> {
        &self.jobs
    }

    /// What the host and its VMs were like.
    pub fn history(&self) -> &Arc<HistoryKeeper> {
        &self.history
    }

    /// The pilot's settings.
    pub(super) fn pilot_record(&self) -> &PilotRecord {
        &self.pilot_record
    }

    /// What the pilot saw and decided.
    pub(super) fn pilot(&self) -> &PilotState {
        &self.pilot
    }

    /// Publishes what a VM's process says. If the guest misses memory, the pilot looks soon.
    pub(super) fn publish(&self, listing: &Listing, figures: VmFigures) {
        if listing.publish(figures) {
            self.pilot.hear_of_missed();
        }
    }

    /// Directories, and the settings of all VMs.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// The task for a VM's process.
    pub(super) fn task(&self, name: &VmName, work: Work) -> Task {
        let slot = self.table.as_ref().and_then(|table| table.give(name.as_str()));
        let parent = std::process::id();
        Task { site: self.site.clone(), name: name.clone(), slot, parent, work }
    }

    /// Checks that keys of swap files stay in memory. A key on a disk may outlive its VM there,
    /// whatever is done to remove it. VMs that are managed already have their keys, so they are not
    /// checked.
    fn check_keys(&self) -> Answer<()> {
        let run_dir = &self.site.run_dir;
        match ebb_store::is_in_memory(run_dir).map_err(failed("the run directory"))? {
            false if !self.keys_on_disk => Err(not_allowed(keys_refused(run_dir))),
            _ => Ok(()),
        }
    }

    /// Measures how fast this host's tiers are.
    ///
    /// # Errors
    /// A tier cannot be measured.
    pub fn calibrate(&self) -> Answer<Calibration> {
        self.calibrated.measure(&self.site.run_dir, self.swap_dir.path())
    }

    /// The listing of each VM.
    pub fn listings(&self) -> Vec<(VmName, Arc<Listing>)> {
        let vms = self.vms();
        let listed = |(name, vm): (&VmName, &Option<_>)| Some((name.clone(), vm.clone()?));
        vms.iter().filter_map(listed).collect()
    }

    /// The listing of a VM.
    pub fn listed(&self, name: &VmName) -> Option<Arc<Listing>> {
        self.vms().get(name).cloned().flatten()
    }

    /// The listing of a VM on record, made if there is none: then it is at this stage.
    pub fn listing(&self, name: &VmName, record: &Record, stage: Stage) -> Arc<Listing> {
        let mut vms = self.vms();
        let vm = vms.entry(name.clone()).or_default();
        let make = || Arc::new(Listing::new(name, record, stage, &self.events));
        Arc::clone(vm.get_or_insert_with(make))
    }

    /// Whether the name is in use.
    pub fn is_known(&self, name: &VmName) -> bool {
        self.vms().contains_key(name)
    }

    /// The API error about a VM that does not exist, with the reason if it has ended.
    pub fn unknown(&self, name: &VmName) -> ApiError {
        let why = self.ended().get(name).cloned();
        why.map_or_else(|| ApiError::Unknown(name.clone()), ApiError::Over)
    }

    /// Records why a VM ended, for clients that ask for it.
    pub(super) fn note_end(&self, name: &VmName, why: String) {
        let mut ended = self.ended();
        if ended.len() == ENDED_MAX {
            ended.pop_first();
        }
        ended.insert(name.clone(), why);
    }

    fn ended(&self) -> MutexGuard<'_, BTreeMap<VmName, String>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a VM that is no longer managed, and tells the `news` of it: before those of the next
    /// VM of this name, which can be started by then.
    pub fn forget(&self, name: &VmName, directory: &Path, news: Option<News>) {
        self.clear_away(name, directory);
        if let Some(table) = &self.table {
            table.take_back(name.as_str());
        }
        let mut vms = self.vms();
        if let Some(news) = news {
            self.events.publish(Some(name), news);
        }
        vms.remove(name);
    }

    /// Reserves a name and makes its directory. If the directory exists, it belongs to a VM that
    /// was detached and still runs: that VM can be attached again, and no other VM can be started
    /// there.
    pub(super) fn reserve(&self, name: &VmName, again: bool) -> Answer<Reserved> {
        self.check_keys()?;
        self.swap_dir.check().map_err(not_allowed)?;
        if let Some(thread) = self.clearing().take() {
            // If that thread panicked, it has cleared away less, and the rest is cleared away
            // below.
            let _ = thread.join();
        }
        let directory = self.site.directory(name);
        match self.vms().entry(name.clone()) {
            Entry::Occupied(_) => {
                return Err(ApiError::Taken(format!("a VM named {name} is managed already")));
            }
            Entry::Vacant(vacant) => drop(vacant.insert(None)),
        }
        // The name is reserved from here on, so others need not wait while disks, control groups
        // and processes are looked at.
        let daemon = self.clone();
        let mut reserved =
            Reserved { daemon, name: name.clone(), directory, made: false, kept: false };
        let directory = &reserved.directory;
        self.clear_away(name, directory);
        reserved.made = match DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            made => made.map(|()| true).map_err(failed("the VM's directory"))?,
        };
        let on_record = Record::load(&reserved.directory).map_err(failed("the VM's record"))?;
        if !reserved.made && (!again || on_record.is_some()) {
            starting::check(directory).map_err(failed("the VM's directory"))?;
            return Err(ApiError::Taken(format!(
                "{} is of a VM that still runs: take another name, or end that VM",
                reserved.directory.display()
            )));
        }
        self.ended().remove(name);
        Ok(reserved)
    }

    /// The thread that clears away what is on no record, at the start.
    pub(super) fn clearing(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.clearing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Measured speed of this host's tiers.
    pub fn calibrated(&self) -> &Arc<Calibrated> {
        &self.calibrated
    }

    /// Takes back the slots of VMs that no longer exist.
    pub(super) fn keep_slots(&self, stays: impl Fn(&str) -> bool) {
        if let Some(table) = &self.table {
            table.keep_only(stays);
        }
    }

    /// The pool.
    pub fn pool(&self) -> &PoolRecord {
        &self.pool
    }

    /// Removes what a VM has left, unless it is still on record or runs.
    pub(super) fn clear_away(&self, name: &VmName, directory: &Path) {
        let was_there = directory.exists();
        if remove_if_dead(directory)
            && was_there
            && let Some(logs) = self.site.logs(name)
        {
            // Other files in it may be somebody else's.
            for file in ["console.log", "console.log.1", "qemu.log", "qemu.log.1"] {
                let _ = fs::remove_file(logs.join(file));
            }
            let _ = fs::remove_dir(&logs);
        }
    }

    /// The VMs by name.
    pub(super) fn vms(&self) -> MutexGuard<'_, Vms> {
        // The map is whole between any two statements that change it.
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reserved name and directory, given up when dropped unless kept.
pub struct Reserved {
    daemon: Daemon,
    name: VmName,
    /// The VM's directory.
    pub directory: PathBuf,
    /// Whether the directory was made for this reservation.
    made: bool,
    kept: bool,
}

impl Reserved {
    /// Keeps name and directory: the VM has them from now on.
    pub fn keep(mut self) {
        self.kept = true;
    }

    /// Notes that a process is about to begin there. From now on nothing is removed without a
    /// check.
    pub fn hand_over(&mut self) {
        self.made = false;
    }

    /// Removes what the process that began there has left, if no VM runs there. The process has
    /// ended. This may take long.
    pub fn clear_away(mut self) {
        self.kept = true;
        self.daemon.forget(&self.name, &self.directory, None);
        // The VM's process may have been in the group of its VM until it ended.
        cgroup::clear_left(false);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // This comes first: the next owner of the name makes a directory of its own there.
        if self.made {
            remove(&self.directory);
        }
        self.daemon.vms().remove(&self.name);
    }
}

fn keys_refused(run_dir: &Path) -> String {
    let (why, advice) = advice::keys_on_disk(run_dir, i32::try_from(std::process::id()).ok());
    format!("{why}: {advice}")
}

/// Removes what a VM has left, if it is proved to have ended. `false`: it runs, or nobody can tell.
fn remove_if_dead(directory: &Path) -> bool {
    let looked = Record::load(directory).and_then(|record| {
        if VmProcess::running(directory)?.is_some() {
            return Ok(false);
        }
        let dead = match record.as_ref().map(Record::life) {
            Some(Life::Lives(_)) => None,
            Some(Life::Dead(dead)) => Some(dead),
            Some(Life::Unknown(error)) => return Err(error),
            None => match starting::end(directory)? {
                Some(dead) => Some(dead),
                // A VM that was detached keeps its control socket as long as it runs.
                None => Life::of_listener(&directory.join("qmp.sock"))?,
            },
        };
        let Some(dead) = dead else { return Ok(false) };
        remains::clear(record.as_ref(), directory, &dead).map(|()| true)
    });
    looked.unwrap_or_else(|error| {
        tracing::error!("{}: not removed: {error}", directory.display());
        false
    })
}

fn remove(directory: &Path) {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::error!("{}: {error}", directory.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
