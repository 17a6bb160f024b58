//! Jobs: long operations that go on while the client does something else. They are in memory only.
//! Each is a task of this daemon, which sends one request or several, and looks how far they are.

mod report;
mod resize;
mod run;
mod silence;
mod table;
#[cfg(test)]
mod tests;
mod what;
mod work;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_api::{Job, JobFigures, JobProgress, VmName};
use tokio::sync::watch;

use self::report::End;
use self::table::Table;
use super::events::{Asker, EventLog, News};
use super::registry::Daemon;
use crate::model::api_error::{Answer, ApiError};

pub use self::what::What;

/// The jobs of a daemon.
pub struct Jobs {
    table: Mutex<Table>,
    /// What the jobs of one VM wait for, because each keeps the VM's worker busy. Jobs of the host
    /// wait for each other, because each keeps the host's disk busy.
    lanes: Mutex<BTreeMap<Option<VmName>, Lane>>,
    events: Arc<EventLog>,
}

/// A turn for each job of one VM, or of the host.
type Lane = Arc<tokio::sync::Mutex<()>>;

/// The task of a job. Its end is noted when this is dropped, whatever came of the task.
struct Doing {
    jobs: Arc<Jobs>,
    id: u64,
    cancelled: watch::Receiver<bool>,
    end: Option<End>,
}

/// Begins a job. It goes on if the client closes its connection.
///
/// # Errors
/// There is no such VM, or too many jobs are under way.
pub fn begin(daemon: &Daemon, vm: Option<VmName>, what: What, asker: Asker) -> Answer<Job> {
    let of = { vm.as_ref() }
        .map(|name| daemon.listed(name).ok_or_else(|| daemon.unknown(name)))
        .transpose()?;
    let jobs = Arc::clone(daemon.jobs());
    let (job, cancelled) = jobs.table().add(what.kind(), vm.clone(), asker)?;
    let vm = vm.zip(of);
    jobs.tell(&job);
    let doing = Doing { jobs, id: job.id, cancelled, end: None };
    tokio::spawn(run::run(daemon.clone(), vm, what, doing));
    Ok(job)
}

impl Jobs {
    /// No jobs yet. They are told among the events.
    pub fn new(events: &Arc<EventLog>) -> Arc<Jobs> {
        let (table, lanes) = (Mutex::default(), Mutex::default());
        Arc::new(Jobs { table, lanes, events: Arc::clone(events) })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is whole between any two statements that change it.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All jobs that are known, the oldest first.
    pub fn list(&self) -> Vec<Job> {
        self.table().list()
    }

    /// A job.
    ///
    /// # Errors
    /// It is not known.
    pub fn get(&self, id: u64) -> Answer<Job> {
        self.table().get(id)
    }

    /// Cancels a job: it ends after its current step.
    ///
    /// # Errors
    /// It is not known, has ended, or cannot be cancelled.
    pub fn cancel(&self, id: u64) -> Answer<Job> {
        self.table().cancel(id)
    }

    /// Where a job waits for its turn among those of its VM, or of the host.
    fn lane(&self, vm: Option<&VmName>) -> Lane {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody waits in the others.
        lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        Arc::clone(lanes.entry(vm.cloned()).or_default())
    }

    fn tell(&self, job: &Job) {
        let what = match &job.error {
            Some(error) => error.error.clone(),
            None => job.text.clone(),
        };
        let figures = JobFigures { id: job.id, kind: job.kind, state: job.state };
        self.events.publish(job.vm.as_ref(), News::Job(figures, what));
    }
}

impl Doing {
    /// Notes that the job begins to run. `false`: it was cancelled before.
    fn start(&self) -> bool {
        self.jobs.table().start(self.id)
    }

    fn note(&self, progress: JobProgress) {
        self.jobs.table().note(self.id, progress);
    }

    fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// Waits until the job is cancelled.
    async fn cancelled(&self) {
        let mut cancelled = self.cancelled.clone();
        if cancelled.wait_for(|is| *is).await.is_err() {
            // Its entry is gone, so nobody can cancel it any more.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Doing {
    fn drop(&mut self) {
        // The task has panicked, or the daemon ends.
        let broken = || End::refused(ApiError::Failed("the daemon ended the job".into()));
        let end = self.end.take().unwrap_or_else(broken);
        let ended = self.jobs.table().end(self.id, end);
        if let Some(job) = ended {
            self.jobs.tell(&job);
        }
    }
}
