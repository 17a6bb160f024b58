//! Jobs: long operations that the daemon carries out while the client does something else.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::choice::choice;
use crate::{ApiErrorBody, DetachReport, EvictReport, ReclaimReport, ResizeReport, VmName};

/// Most jobs that the daemon remembers. When all of them are under way, a further one is refused.
pub const JOBS_MAX: usize = 256;

choice! {
    /// What a job does. Later releases may add kinds.
    JobKind {
        /// Reclaim free memory once.
        Reclaim = "reclaim",
        /// Evict memory, whether it is used or not.
        Evict = "evict",
        /// Bring a VM to its target size.
        Resize = "resize",
        /// Bring a VM's memory back and stop managing it.
        Detach = "detach",
        /// Find out which memory is hot.
        Heat = "heat",
        /// Measure how fast the host's tiers are.
        Calibrate = "calibrate",
    }
}

choice! {
    /// How far a job is.
    JobState {
        /// Nothing is done yet: an earlier job of the VM comes first.
        Waiting = "waiting",
        /// It is being done.
        Running = "running",
        /// It has ended. The report says how far it came.
        Done = "done",
        /// It was refused, or has failed: the error says why.
        Failed = "failed",
        /// It has ended before its time, because it was cancelled or something else took its place.
        /// What was done until then stays done.
        Cancelled = "cancelled",
    }
}

choice! {
    /// What a job's progress is counted in.
    JobUnit {
        /// Memory.
        Bytes = "bytes",
        /// Windows of a monitoring.
        Windows = "windows",
    }
}

impl JobState {
    /// Whether the job is over.
    pub const fn is_over(self) -> bool {
        matches!(self, JobState::Done | JobState::Failed | JobState::Cancelled)
    }
}

/// How much of a job is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct JobProgress {
    /// What is done.
    pub done: u64,
    /// What there is to do; null: nobody knows. It may end with less: a reclaim ends where nothing
    /// more is free.
    pub total: Option<u64>,
    /// What both are counted in.
    pub unit: JobUnit,
}

/// A long operation. The report that belongs to its kind is there once it has ended; the others are
/// absent. Other kinds have none: the route that they were begun by tells what they found.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Its number, greater than that of each earlier job, also of an earlier daemon.
    pub id: u64,
    /// What it does.
    pub kind: JobKind,
    /// Name of the VM; null: it is about the host.
    #[schema(value_type = Option<String>)]
    pub vm: Option<VmName>,
    /// How far it is.
    pub state: JobState,
    /// Whether it can be cancelled now.
    pub can_cancel: bool,
    /// It was cancelled, and ends after its present step.
    pub cancelling: bool,
    /// When it was asked for, by RFC 3339, in UTC.
    #[schema(format = DateTime)]
    pub begun: String,
    /// When it ended, by RFC 3339, in UTC; null: it has not.
    pub ended: Option<String>,
    /// How much is done; null: that is not known, or not yet.
    pub progress: Option<JobProgress>,
    /// What came of it, in one line; empty: it has not ended.
    pub text: String,
    /// Why it has failed; null: it has not.
    pub error: Option<ApiErrorBody>,
    /// What a reclaim did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaim: Option<ReclaimReport>,
    /// What an eviction did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evict: Option<EvictReport>,
    /// How far a resize came. Where it is blocked, its state is `waiting`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resize: Option<ResizeReport>,
    /// What a detach brought back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detach: Option<DetachReport>,
}

/// How a long operation is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct JobQuery {
    /// Answer at once with a job (202), and do it meanwhile. Without it: the operation's own answer.
    #[serde(default)]
    #[param(required = false)]
    pub job: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_three_states_are_the_end() {
        let over: Vec<JobState> =
            JobState::ALL.iter().copied().filter(|state| state.is_over()).collect();
        assert_eq!(over, [JobState::Done, JobState::Failed, JobState::Cancelled]);
    }

    #[test]
    fn a_job_has_the_report_of_its_kind_alone() {
        let job = Job {
            id: 7,
            kind: JobKind::Detach,
            vm: None,
            state: JobState::Done,
            can_cancel: false,
            cancelling: false,
            begun: "2026-11-28T14:05:12.345Z".into(),
            ended: None,
            progress: None,
            text: String::new(),
            error: None,
            reclaim: None,
            evict: None,
            resize: None,
            detach: Some(DetachReport::default()),
        };
        let text = serde_json::to_string(&job).expect("text");
        assert!(text.contains("\"detach\"") && !text.contains("\"reclaim\""), "{text}");
        assert_eq!(serde_json::from_str::<Job>(&text).expect("a job"), job);
    }
}
