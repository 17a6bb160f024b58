//! What everybody may know of a VM without waiting for it: whether it is held, and its last
//! figures, which its worker publishes.

use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::{State, VmStatus, VmSummary, advice};

use super::context::mailbox::Command;
use super::summary;
use crate::model::api_error::{Answer, ApiError};
use crate::model::member::Member;
use crate::model::record::Record;
use crate::support::privileges::want_of_descriptors;

/// One VM of this daemon.
pub struct Listing(Mutex<Seen>);

struct Seen {
    stage: Stage,
    summary: VmSummary,
    status: Option<Box<VmStatus>>,
    /// When the figures were true; none: they are as the record says.
    at: Option<Instant>,
    member: Option<Member>,
}

/// What is being done with it.
pub enum Stage {
    /// It is being taken up.
    TakingUp,
    /// It is served, and takes its commands there.
    Held(Sender<Command>),
    /// It is not, why, and when it is tried again; none: this daemon does not.
    NotTakenUp(String, Option<Instant>),
}

impl Stage {
    fn state(&self) -> State {
        match self {
            Stage::TakingUp => State::TakingUp,
            Stage::Held(_) => State::Held,
            Stage::NotTakenUp(..) => State::NotTakenUp,
        }
    }

    /// Why it is in this one.
    fn reason(&self) -> Option<String> {
        match self {
            Stage::Held(_) => None,
            Stage::TakingUp => Some("a daemon before this one managed it".into()),
            Stage::NotTakenUp(why, again) => Some(not_taken_up(why, *again)),
        }
    }
}

/// Why it is not served, and what is to be expected or done.
fn not_taken_up(why: &str, again: Option<Instant>) -> String {
    let why = match want_of_descriptors(why) {
        Some(told) => format!("{why}: {told}"),
        None => why.into(),
    };
    match again {
        Some(again) => {
            let left = again.saturating_duration_since(Instant::now());
            format!("{why}; tried again in {} s", left.as_secs() + 1)
        }
        None => {
            let end = advice::end(std::process::id());
            format!("{why}; not tried again: {end}, the next ebb command starts it anew")
        }
    }
}

impl Listing {
    /// Of a VM on record.
    pub fn new(record: &Record, stage: Stage) -> Listing {
        let (summary, member) = (summary::on_record(record), Member::on_record(record));
        Listing(Mutex::new(Seen { stage, summary, status: None, at: None, member }))
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        // It is whole between any two statements that change it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on it is at this stage.
    pub fn set(&self, stage: Stage) {
        self.seen().stage = stage;
    }

    /// Its figures as they are now.
    pub fn publish(&self, status: VmStatus, member: Option<Member>) {
        let mut seen = self.seen();
        seen.summary = summary::of(&status);
        (seen.status, seen.at, seen.member) =
            (Some(Box::new(status)), Some(Instant::now()), member);
    }

    /// Where it takes its commands.
    ///
    /// # Errors
    /// It is not held now, and why.
    pub fn commands(&self) -> Answer<Sender<Command>> {
        let seen = self.seen();
        match &seen.stage {
            Stage::Held(commands) => Ok(commands.clone()),
            stage => Err(ApiError::Unavailable(format!(
                "{} is {}: {}",
                seen.summary.name,
                stage.state(),
                stage.reason().unwrap_or_default()
            ))),
        }
    }

    /// What the pool last heard of it.
    pub fn member(&self) -> Option<Member> {
        self.seen().member
    }

    /// Its line in the list, as it was last known.
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

    /// All that was last known of it.
    ///
    /// # Errors
    /// Nothing is yet, and why.
    pub fn status(&self) -> Answer<VmStatus> {
        let seen = self.seen();
        let (Some(status), Some(at)) = (&seen.status, seen.at) else {
            drop(seen);
            self.commands()?;
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

/// Of a worker that publishes every second.
const SLOW: Duration = Duration::from_secs(5);

fn slow(age: Duration) -> Option<String> {
    let since = || format!("it is busy, or QEMU does not answer, for {} s", age.as_secs());
    (age >= SLOW).then(since)
}

fn millis(age: Duration) -> u64 {
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_tried_again_names_the_process_to_end() {
        let told = Stage::NotTakenUp("it broke".into(), None).reason().unwrap();
        assert!(told.starts_with("it broke; "), "{told}");
        assert!(told.contains(&format!("`kill {}`", std::process::id())), "{told}");
        let later = Stage::NotTakenUp("it broke".into(), Some(Instant::now())).reason().unwrap();
        assert!(later.contains("tried again in") && !later.contains("kill"), "{later}");
    }
}
