//! Long operations as jobs of the daemon: begun, followed to their end, or left alone.

use std::time::{Duration, Instant};
use std::{fmt, thread};

use anyhow::bail;
use ebb_api::{Job, JobState, route};
use serde::Deserialize;

use crate::progress::Progress;
use crate::{Outcome, show};

/// Time from one question about a job to the next. The daemon answers from memory.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What the daemon answers to a request that is to be a job. A daemon of an earlier release knows no
/// jobs, and answers once all is done.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Begun<R> {
    Job(Box<Job>),
    Report(R),
}

/// Waits until a job has ended, and shows how far it is. `look` asks for the job.
///
/// # Errors
/// Those of `look`.
pub fn follow(
    mut job: Job,
    what: &str,
    progress: &mut Progress,
    look: impl Fn() -> anyhow::Result<Job>,
) -> anyhow::Result<Job> {
    let began = Instant::now();
    while !job.state.is_over() {
        let time_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        progress.show(&show::doing(what, job.progress, time_ns));
        thread::sleep(LOOK_EVERY);
        job = look()?;
    }
    Ok(job)
}

/// A long operation that has ended.
pub struct Ended<R> {
    /// What it did.
    pub report: R,
    /// The number of its job, which was cancelled; none: it went to its end.
    cancelled: Option<u64>,
}

impl<R> Ended<R> {
    /// It went to its end.
    pub fn whole(report: R) -> Ended<R> {
        Ended { report, cancelled: None }
    }

    /// What this program prints, and how it ends. `text`: what it says of the report.
    pub fn outcome(&self, text: String) -> Outcome {
        let Some(id) = self.cancelled else { return text.into() };
        eprintln!("ebb: job {id} was cancelled; what it did until then stays done");
        Outcome { text, code: route::EXIT_CANCELLED }
    }
}

/// A job was cancelled before it had anything to report.
#[derive(Debug)]
pub struct Cancelled {
    id: u64,
    text: String,
}

impl fmt::Display for Cancelled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job {} was cancelled: {}", self.id, self.text)
    }
}

impl std::error::Error for Cancelled {}

/// What came of a job that has ended.
///
/// # Errors
/// It has failed, or was cancelled before it had anything to report.
pub fn ended<R>(job: Job, of: impl FnOnce(Job) -> Option<R>) -> anyhow::Result<Ended<R>> {
    let (id, state, text) = (job.id, job.state, job.text.clone());
    if let Some(error) = &job.error {
        let hint = error.hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default();
        bail!("{}{hint}", error.error);
    }
    let is_cancelled = state == JobState::Cancelled;
    match of(job) {
        Some(report) => Ok(Ended { report, cancelled: is_cancelled.then_some(id) }),
        None if is_cancelled => Err(Cancelled { id, text }.into()),
        None => bail!("job {id} has no report: {text}"),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ebb_api::ReclaimReport;
    use serde_json::{Value, json};

    use super::*;

    fn a_job(state: &str) -> Value {
        json!({ "id": 17, "kind": "reclaim", "vm": "web", "state": state, "can_cancel": true,
            "cancelling": false, "begun": "2026-11-28T14:05:12.345Z", "ended": null,
            "progress": null, "text": "nothing was done", "error": null })
    }

    fn job(of: &Value) -> Job {
        serde_json::from_value(of.clone()).expect("a job")
    }

    fn a_report() -> Value {
        json!({ "bytes": 5, "blocks": 1, "duration_ns": 1, "scan_ns": 1, "stopped_by": "it",
            "skipped": { "in_use": 0, "already_empty": 0, "cancelled": 0 } })
    }

    #[test]
    fn an_earlier_daemon_answers_with_the_report() {
        let begun = |answer: Value| serde_json::from_value::<Begun<ReclaimReport>>(answer);
        assert!(matches!(begun(a_job("waiting")), Ok(Begun::Job(job)) if job.id == 17));
        assert!(matches!(begun(a_report()), Ok(Begun::Report(report)) if report.bytes == 5));
    }

    #[test]
    fn a_job_is_followed_to_its_end() {
        let looks = Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            Ok(job(&a_job(if looks.get() == 2 { "done" } else { "running" })))
        };
        let first = job(&a_job("waiting"));
        let over = follow(first, "web: reclaiming", &mut Progress::new(true), look).expect("it");
        assert_eq!((over.state, looks.get()), (JobState::Done, 2));
    }

    #[test]
    fn a_job_without_a_report_says_why() {
        let end = |value: &Value| ended(job(value), |job| job.reclaim);
        let why = |value: &Value| end(value).err().expect("no report").to_string();
        assert_eq!(why(&a_job("cancelled")), "job 17 was cancelled: nothing was done");
        assert!(end(&a_job("cancelled")).err().expect("no report").is::<Cancelled>());
        assert_eq!(why(&a_job("done")), "job 17 has no report: nothing was done");
        let mut failed = a_job("failed");
        failed["error"] = json!({ "code": "not_trusted", "error": "no", "hint": "wait" });
        assert_eq!(why(&failed), "no; wait");
        let mut cut = a_job("cancelled");
        cut["reclaim"] = a_report();
        let cut = end(&cut).expect("what was done");
        assert_eq!((cut.report.bytes, cut.cancelled), (5, Some(17)));
        let mut whole = a_job("done");
        whole["reclaim"] = a_report();
        assert_eq!(end(&whole).expect("what was done").cancelled, None);
    }
}
