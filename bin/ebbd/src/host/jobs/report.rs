//! How a job ended.

use ebb_api::{
    ApiErrorBody, DetachReport, EVENT_TEXT_BYTES_MAX, EvictReport, Job, JobProgress, JobState,
    JobUnit, ReclaimReport, ResizeReport, SizeState,
};
use ebb_units::Bytes;

use crate::model::work::CANCELLED;

/// How a job ended, and what it has to report.
pub struct End {
    pub state: JobState,
    pub text: String,
    pub error: Option<ApiErrorBody>,
    pub report: Report,
}

/// What a job has to report.
pub enum Report {
    Nothing,
    Reclaim(ReclaimReport),
    Evict(EvictReport),
    Resize(ResizeReport),
    Detach(DetachReport),
}

impl End {
    /// It is done, and has no report.
    pub fn done(text: &str) -> End {
        End { state: JobState::Done, text: text.into(), error: None, report: Report::Nothing }
    }

    /// It ended before its time, and why.
    pub fn cancelled(text: &str, report: Report) -> End {
        End { state: JobState::Cancelled, text: text.into(), error: None, report }
    }

    /// It was refused, or has failed.
    pub fn refused(why: impl Into<ApiErrorBody>) -> End {
        let error = why.into();
        let state = JobState::Failed;
        End { state, text: error.error.clone(), error: Some(error), report: Report::Nothing }
    }

    /// A reclaim has ended.
    pub fn reclaimed(report: ReclaimReport) -> End {
        let text = format!("reclaimed {}: {}", Bytes(report.bytes), report.stopped_by);
        End { text, ..stopped(&report.stopped_by.clone(), Report::Reclaim(report)) }
    }

    /// An eviction has ended.
    pub fn evicted(report: EvictReport) -> End {
        let text = format!("evicted {}: {}", Bytes(report.saved_bytes), report.stopped_by);
        End { text, ..stopped(&report.stopped_by.clone(), Report::Evict(report)) }
    }

    /// A resize has reached its target, or is blocked.
    pub fn resized(report: ResizeReport) -> End {
        let size = Bytes(report.bytes);
        let text = match report.state {
            SizeState::Waiting => format!("stays at {size}: {}", report.stopped_by),
            _ => format!("has {size}: {}", report.stopped_by),
        };
        End { text, ..stopped("", Report::Resize(report)) }
    }

    /// A VM is detached.
    pub fn detached(report: DetachReport) -> End {
        let text = format!("{} brought back", Bytes(report.restored_bytes));
        End { text, ..stopped("", Report::Detach(report)) }
    }

    /// Notes the end in the job.
    pub fn note(self, job: &mut Job) {
        let End { state, text, error, report } = self;
        let bytes =
            |done| Some(JobProgress { done, total: total(job, done), unit: JobUnit::Bytes });
        job.progress = match &report {
            Report::Reclaim(report) => bytes(report.bytes),
            Report::Evict(report) => bytes(report.saved_bytes),
            Report::Detach(report) => bytes(report.restored_bytes),
            Report::Resize(_) | Report::Nothing => job.progress,
        };
        job.state = state;
        job.text = bounded(text);
        job.error = error.map(|error| ApiErrorBody { error: bounded(error.error), ..error });
        match report {
            Report::Nothing => {}
            Report::Reclaim(report) => job.reclaim = Some(report),
            Report::Evict(report) => job.evict = Some(report),
            Report::Resize(report) => job.resize = Some(report),
            Report::Detach(report) => job.detach = Some(report),
        }
    }
}

fn stopped(stopped_by: &str, report: Report) -> End {
    let is_cancelled = stopped_by == CANCELLED;
    let state = if is_cancelled { JobState::Cancelled } else { JobState::Done };
    End { state, text: String::new(), error: None, report }
}

/// What there was to do, as far as is known: a job that was over before anybody looked has none.
fn total(job: &Job, done: u64) -> Option<u64> {
    let known = job.progress.and_then(|progress| progress.total);
    known.map(|total| total.max(done))
}

/// As much of a text as an event has.
fn bounded(mut text: String) -> String {
    let most = text.len().min(EVENT_TEXT_BYTES_MAX);
    let end = (0..=most).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.truncate(end);
    text
}
