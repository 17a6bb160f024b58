//! What can be known of a VM without waiting for it: whether it is managed, and the last figures
//! that its process published.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::{State, VmStatus, VmSummary};

use crate::model::api_error::{Answer, ApiError};
use crate::model::figures::{VmFigures, millis, slow};
use crate::model::host_pressure::Watched;
use crate::model::member::Member;
use crate::model::record::Record;
use crate::model::summary;
use crate::support::privileges::want_of_descriptors;

/// What is known of one VM of this daemon.
pub struct Listing(Mutex<Seen>);

struct Seen {
    stage: Stage,
    summary: VmSummary,
    status: Option<Box<VmStatus>>,
    /// When the figures were true; none: they come from the record.
    at: Option<Instant>,
    /// When its process last showed a sign of life.
    heard: Instant,
    /// Number of the figures.
    number: u64,
    member: Option<Member>,
}

/// Whether the VM is managed.
pub enum Stage {
    /// It is being recovered.
    Recovering,
    /// Its process serves it.
    Managed,
    /// No process serves it: why, and when the next try is.
    NotRecovered(String, Instant),
}

impl Stage {
    fn state(&self) -> State {
        match self {
            Stage::Recovering => State::Recovering,
            Stage::Managed => State::Managed,
            Stage::NotRecovered(..) => State::NotRecovered,
        }
    }

    /// The state as messages name it.
    fn words(&self) -> &'static str {
        match self {
            Stage::Managed => "managed",
            Stage::Recovering => "being recovered",
            Stage::NotRecovered(..) => "not recovered",
        }
    }

    /// Why the VM is at this stage.
    fn reason(&self) -> Option<String> {
        match self {
            Stage::Managed => None,
            Stage::Recovering => Some("an earlier process managed it".into()),
            Stage::NotRecovered(why, again) => Some(why_not_recovered(why, *again)),
        }
    }
}

/// Why the VM is not served, and what is to be expected or done.
fn why_not_recovered(why: &str, again: Instant) -> String {
    let why = match want_of_descriptors(why) {
        Some(advice) => format!("{why}: {advice}"),
        None => why.into(),
    };
    let left = again.saturating_duration_since(Instant::now());
    format!("{why}; tried again in {} s", left.as_secs() + 1)
}

impl Listing {
    /// The listing of a VM on record.
    pub fn new(record: &Record, stage: Stage) -> Listing {
        let (summary, member) = (summary::on_record(record), Member::on_record(record));
        let heard = Instant::now();
        Listing(Mutex::new(Seen {
            stage,
            summary,
            status: None,
            at: None,
            heard,
            number: 0,
            member,
        }))
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        // The state is whole between any two statements that change it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the stage.
    pub fn set(&self, stage: Stage) {
        let mut seen = self.seen();
        // Each process counts its figures from the beginning.
        (seen.stage, seen.heard, seen.number) = (stage, Instant::now(), 0);
    }

    /// Notes a sign of life of its process, which therefore serves the VM.
    pub fn hear(&self) {
        let mut seen = self.seen();
        seen.heard = Instant::now();
        if let Stage::Recovering = seen.stage {
            seen.stage = Stage::Managed;
        }
    }

    /// Time since the last sign of life.
    pub fn heard(&self) -> Duration {
        self.seen().heard.elapsed()
    }

    /// Publishes new figures.
    pub fn publish(&self, figures: VmFigures) {
        let VmFigures { number, status, member } = figures;
        let mut seen = self.seen();
        if number < seen.number {
            return;
        }
        seen.number = number;
        let member = member.filter(|member| member.share.adds_up());
        let age = Duration::from_millis(status.age_ms);
        seen.summary = summary::of(&status);
        (seen.status, seen.at, seen.member) =
            (Some(Box::new(status)), Instant::now().checked_sub(age), member);
    }

    /// Checks that its process serves it now.
    ///
    /// # Errors
    /// It does not, and why.
    pub fn reach(&self) -> Answer<()> {
        let seen = self.seen();
        match &seen.stage {
            Stage::Managed => Ok(()),
            stage => Err(ApiError::Unavailable(format!(
                "{} is {}: {}",
                seen.summary.name,
                stage.words(),
                stage.reason().unwrap_or_default()
            ))),
        }
    }

    /// What the VM last told the pool.
    pub fn member(&self) -> Option<Member> {
        self.seen().member
    }

    /// What is to be known of it to watch the host for it; none: it did not ask for that, or it
    /// cannot answer now.
    pub fn watched(&self) -> Option<Watched> {
        let seen = self.seen();
        let is_slow = seen.at.is_none_or(|at| slow(at.elapsed()).is_some());
        let status = seen.status.as_deref().filter(|_| !is_slow);
        status.filter(|_| matches!(seen.stage, Stage::Managed)).and_then(Watched::of)
    }

    /// Its line in the list, as last known.
    pub fn summary(&self) -> VmSummary {
        let seen = self.seen();
        let age = seen.at.map(|at| at.elapsed());
        let slow = age.and_then(slow);
        VmSummary {
            state: seen.stage.state(),
            state_reason: seen.stage.reason().or(slow),
            age_ms: age.map(millis),
            ..seen.summary.clone()
        }
    }

    /// Its status, as last known.
    ///
    /// # Errors
    /// There is none yet, and why.
    pub fn status(&self) -> Answer<VmStatus> {
        let seen = self.seen();
        let (Some(status), Some(at)) = (&seen.status, seen.at) else {
            drop(seen);
            self.reach()?;
            return Err(ApiError::Unavailable("it was recovered just now: try again".into()));
        };
        let age = at.elapsed();
        Ok(VmStatus {
            state: seen.stage.state(),
            state_reason: seen.stage.reason().or_else(|| slow(age)),
            age_ms: millis(age),
            ..(**status).clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_recovered_says_when_it_is_tried_again() {
        let later = Instant::now() + Duration::from_secs(30);
        let told = Stage::NotRecovered("it broke".into(), later).reason().unwrap();
        assert_eq!(told, "it broke; tried again in 30 s");
    }
}
