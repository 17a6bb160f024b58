//! The table of jobs: bounded, and the oldest that have ended go first.

use std::collections::BTreeMap;

use ebb_api::{JOBS_MAX, Job, JobKind, JobProgress, JobState, VmName};
use jiff::Timestamp;
use tokio::sync::watch;

use super::report::End;
use super::what::why_it_goes_on;
use crate::host::events::Asker;
use crate::model::api_error::{Answer, ApiError, not_allowed};

/// Most jobs of other machines that can be under way. The rest is for clients of this host.
pub const JOBS_AFAR_MAX: usize = JOBS_MAX / 2;

/// The jobs by number.
pub struct Table {
    next: u64,
    jobs: BTreeMap<u64, Entry>,
}

struct Entry {
    job: Job,
    asker: Asker,
    cancel: watch::Sender<bool>,
}

impl Default for Table {
    /// Numbers begin above those of all earlier daemons: no daemon has begun more than one job each
    /// millisecond.
    fn default() -> Table {
        let now = u64::try_from(Timestamp::now().as_millisecond()).unwrap_or(0);
        Table { next: now.max(1), jobs: BTreeMap::new() }
    }
}

impl Table {
    /// Adds a job that waits for its turn. Also returns a receiver that is true once the job is
    /// cancelled.
    ///
    /// # Errors
    /// Too many are under way.
    pub fn add(
        &mut self,
        kind: JobKind,
        vm: Option<VmName>,
        asker: Asker,
    ) -> Answer<(Job, watch::Receiver<bool>)> {
        self.make_room(asker)?;
        let (cancel, cancelled) = watch::channel(false);
        let job = Job {
            id: self.next,
            kind,
            vm,
            state: JobState::Waiting,
            can_cancel: true,
            cancelling: false,
            begun: now(),
            ended: None,
            progress: None,
            text: String::new(),
            error: None,
            reclaim: None,
            evict: None,
            resize: None,
            detach: None,
        };
        self.jobs.insert(job.id, Entry { job: job.clone(), asker, cancel });
        self.next += 1;
        Ok((job, cancelled))
    }

    fn make_room(&mut self, asker: Asker) -> Answer<()> {
        let is_afar = |entry: &&Entry| !entry.job.state.is_over() && entry.asker == Asker::Afar;
        let afar = self.jobs.values().filter(is_afar).count();
        if asker == Asker::Afar && afar >= JOBS_AFAR_MAX {
            return Err(ApiError::TooManyJobs(afar));
        }
        if self.jobs.len() < JOBS_MAX {
            return Ok(());
        }
        let oldest = self.jobs.iter().find(|(_, entry)| entry.job.state.is_over());
        let id = oldest.map(|(id, _)| *id).ok_or(ApiError::TooManyJobs(self.jobs.len()))?;
        self.jobs.remove(&id);
        Ok(())
    }

    /// All jobs, the oldest first.
    pub fn list(&self) -> Vec<Job> {
        self.jobs.values().map(|entry| entry.job.clone()).collect()
    }

    /// A job.
    ///
    /// # Errors
    /// It is not known.
    pub fn get(&self, id: u64) -> Answer<Job> {
        self.jobs.get(&id).map(|entry| entry.job.clone()).ok_or(ApiError::UnknownJob(id))
    }

    /// Cancels a job: it ends after its current step.
    ///
    /// # Errors
    /// It is not known, has ended, or cannot be cancelled.
    pub fn cancel(&mut self, id: u64) -> Answer<Job> {
        let entry = self.jobs.get_mut(&id).ok_or(ApiError::UnknownJob(id))?;
        let job = &mut entry.job;
        if job.state.is_over() {
            return Err(not_allowed(format!("job {id} has ended already: {}", job.state)));
        }
        if let Some(why) = why_it_goes_on(job.kind).filter(|_| job.state == JobState::Running) {
            return Err(not_allowed(format!("job {id} cannot be cancelled: {why}")));
        }
        (job.cancelling, job.can_cancel) = (true, false);
        entry.cancel.send_replace(true);
        Ok(job.clone())
    }

    /// Notes that a job begins to run. `false`: it was cancelled before.
    pub fn start(&mut self, id: u64) -> bool {
        let Some(Entry { job, .. }) = self.jobs.get_mut(&id) else { return false };
        if job.cancelling {
            return false;
        }
        job.state = JobState::Running;
        job.can_cancel = why_it_goes_on(job.kind).is_none();
        true
    }

    /// Notes how far a job is.
    pub fn note(&mut self, id: u64, progress: JobProgress) {
        if let Some(Entry { job, .. }) = self.jobs.get_mut(&id) {
            job.progress = Some(progress);
        }
    }

    /// Notes how a job ended, and returns it.
    pub fn end(&mut self, id: u64, end: End) -> Option<Job> {
        let Entry { job, .. } = self.jobs.get_mut(&id)?;
        end.note(job);
        (job.can_cancel, job.cancelling, job.ended) = (false, false, Some(now()));
        Some(job.clone())
    }
}

fn now() -> String {
    format!("{:.3}", Timestamp::now())
}
