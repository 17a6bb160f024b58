//! What can be known of a VM without waiting for it: whether it is managed, and the last figures
//! that its process published.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::{FaultSpread, State, VmChange, VmName, VmStatus, VmSummary};

use super::events::{EventLog, News, States, Warnings};
use super::fault_window::FaultWindow;
use super::rates::{PerSecond, Rates};
use super::saved::Saved;
use crate::model::api_error::{Answer, ApiError};
use crate::model::figures::{MISSED_BYTES, VmFigures, millis, slow};
use crate::model::host_pressure::Watched;
use crate::model::member::Member;
use crate::model::piloted::Piloted;
use crate::model::record::Record;
use crate::model::summary;
use crate::model::times::Times;
use crate::support::life::{Identity, Life};
use crate::support::privileges::want_of_descriptors;

/// What is known of one VM of this daemon. It tells of changes among the daemon's events.
pub struct Listing {
    name: VmName,
    vmm: Vmm,
    known: Mutex<Known>,
    events: Arc<EventLog>,
}

/// Which process the VM's QEMU is.
struct Vmm {
    pid: i32,
    start_ticks: u64,
    boot: String,
}

struct Known {
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
    piloted: Option<Piloted>,
    times: Option<Times>,
    states: States,
    warnings: Warnings,
    rates: Rates,
    fault_window: FaultWindow,
    saved: Saved,
}

/// All that is known of a VM, as last known.
pub struct Seen {
    pub summary: VmSummary,
    /// None: it has not published yet.
    pub status: Option<Box<VmStatus>>,
    pub rates: Option<PerSecond>,
    /// Time that the faults of the last seconds took; none: not known.
    pub fault_ns: Option<FaultSpread>,
    pub piloted: Option<Piloted>,
    /// None: its process is of an older daemon.
    pub times: Option<Times>,
    /// Memory that it has and does not take of the host, summed up over time.
    pub saved_byte_seconds: f64,
    /// Whether the figures are old.
    pub is_slow: bool,
}

impl Known {
    /// Whether its process can be expected to answer now.
    fn answers(&self) -> bool {
        let is_slow = self.at.is_none_or(|at| slow(at.elapsed()).is_some());
        matches!(self.stage, Stage::Managed) && !is_slow
    }

    /// Whether the VM misses memory since its last figures, and the pilot's limit keeps it away.
    fn misses_memory(&self, now: &VmStatus) -> bool {
        let Some(before) = &self.status else { return false };
        let again =
            { now.limit.refaulted_total_bytes }.saturating_sub(before.limit.refaulted_total_bytes);
        let is_piloted = self.piloted.as_ref().is_some_and(|it| it.limit_bytes.is_some());
        is_piloted && (again >= MISSED_BYTES || now.limit.waits)
    }

    /// Its line in the list.
    fn summary(&self) -> VmSummary {
        let age = self.at.map(|at| at.elapsed());
        let slow = age.and_then(slow);
        VmSummary {
            state: self.stage.state(),
            state_reason: self.stage.reason().or(slow).or(self.summary.state_reason.clone()),
            age_ms: age.map(millis),
            ..self.summary.clone()
        }
    }
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

    /// The state, and why, as events tell it.
    fn change(&self) -> (VmChange, Option<String>) {
        match self {
            Stage::Recovering => (VmChange::Recovering, None),
            Stage::Managed => (VmChange::Managed, None),
            Stage::NotRecovered(why, _) => (VmChange::NotRecovered, Some(why.clone())),
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
    /// The listing of a VM on record. Whoever has it managed from the start has told so.
    pub fn new(name: &VmName, record: &Record, stage: Stage, events: &Arc<EventLog>) -> Listing {
        let (summary, member) = (summary::on_record(record), Member::on_record(record));
        let heard = Instant::now();
        let states = match stage {
            Stage::Managed => States::managed(),
            _ => States::default(),
        };
        let (pid, start_ticks, boot) = (record.pid, record.start_ticks, record.boot.clone());
        let known = Known {
            stage,
            summary,
            status: None,
            at: None,
            heard,
            number: 0,
            member,
            piloted: None,
            times: None,
            states,
            warnings: Warnings::default(),
            rates: Rates::default(),
            fault_window: FaultWindow::default(),
            saved: Saved::default(),
        };
        Listing {
            name: name.clone(),
            vmm: Vmm { pid, start_ticks, boot },
            known: Mutex::new(known),
            events: Arc::clone(events),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // The state is whole between any two statements that change it.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the stage.
    pub fn set(&self, stage: Stage) {
        let mut known = self.known();
        let (change, reason) = stage.change();
        self.tell(&mut known, change, reason);
        // Each process counts its figures from the beginning.
        (known.stage, known.heard, known.number) = (stage, Instant::now(), 0);
    }

    /// Notes that its process has ended, and how. The next one is about to recover it.
    pub fn lose_process(&self, how: &str) {
        let mut known = self.known();
        self.tell(&mut known, VmChange::Recovering, Some(how.into()));
        (known.stage, known.heard, known.number) = (Stage::Recovering, Instant::now(), 0);
    }

    /// Tells of a change of its state, if that is news.
    fn tell(&self, known: &mut Known, change: VmChange, reason: Option<String>) {
        if let Some(news) = known.states.change(change, reason) {
            self.events.publish(Some(&self.name), news);
        }
    }

    /// Whether its QEMU is known to run.
    pub fn vmm_lives(&self) -> bool {
        let Vmm { pid, start_ticks, boot } = &self.vmm;
        let identity = Identity { pid: *pid, start_ticks: *start_ticks, boot };
        matches!(Life::of(identity), Life::Lives(_))
    }

    /// Notes a sign of life of its process, which therefore serves the VM.
    pub fn hear(&self) {
        let mut known = self.known();
        known.heard = Instant::now();
        if let Stage::Recovering = known.stage {
            known.stage = Stage::Managed;
            self.tell(&mut known, VmChange::Managed, None);
        }
    }

    /// Time since the last sign of life.
    pub fn heard(&self) -> Duration {
        self.known().heard.elapsed()
    }

    /// Publishes new figures. Returns whether the pilot should look at the VM soon.
    pub fn publish(&self, figures: VmFigures) -> bool {
        let VmFigures { number, status, member, piloted, times } = figures;
        let mut known = self.known();
        if number < known.number {
            return false;
        }
        known.number = number;
        let member = member.filter(|member| member.share.adds_up());
        let age = Duration::from_millis(status.age_ms);
        known.piloted = piloted.filter(Piloted::adds_up);
        let times = times.filter(Times::adds_up);
        let faults = times.as_ref().map(Times::faults);
        known.times = times;
        known.summary = summary::of(&status);
        let waits = summary::waits(&status.limit).map(|why| format!("its guest waits: {why}"));
        let warnings = status.warnings.iter().chain(&waits).map(String::as_str);
        for figures in known.warnings.update(warnings) {
            self.events.publish(Some(&self.name), News::Warning(figures));
        }
        let at = Instant::now().checked_sub(age);
        if let Some(at) = at {
            known.rates.take(at, &status);
            known.fault_window.take(at, faults);
            known.saved.take(at, &status);
        }
        let misses = known.misses_memory(&status);
        (known.status, known.at, known.member) = (Some(Box::new(status)), at, member);
        misses
    }

    /// Checks that its process serves it now.
    ///
    /// # Errors
    /// It does not, and why.
    pub fn reach(&self) -> Answer<()> {
        let known = self.known();
        match &known.stage {
            Stage::Managed => Ok(()),
            stage => Err(ApiError::Unavailable(format!(
                "{} is {}: {}",
                known.summary.name,
                stage.words(),
                stage.reason().unwrap_or_default()
            ))),
        }
    }

    /// What the VM last reported to the pool.
    pub fn member(&self) -> Option<Member> {
        self.known().member
    }

    /// What is to be known of it to watch the host for it; none: it did not ask for that.
    pub fn watched(&self) -> Option<Watched> {
        let known = self.known();
        known.status.as_deref().and_then(|status| Watched::of(status, known.answers()))
    }

    /// Its status and what it last told the pilot; none: it cannot be expected to answer now.
    pub fn piloted(&self) -> Option<(VmStatus, Piloted)> {
        let known = self.known();
        let status = known.status.as_deref().filter(|_| known.answers())?;
        Some((status.clone(), known.piloted.clone()?))
    }

    /// Its line in the list, as last known.
    pub fn summary(&self) -> VmSummary {
        self.known().summary()
    }

    /// All that is known of it.
    pub fn seen(&self) -> Seen {
        let known = self.known();
        let is_slow = known.at.is_none_or(|at| slow(at.elapsed()).is_some());
        Seen {
            summary: known.summary(),
            status: known.status.clone(),
            rates: known.rates.last(),
            fault_ns: known.fault_window.spread(),
            piloted: known.piloted.clone(),
            times: known.times.clone(),
            saved_byte_seconds: known.saved.byte_seconds(),
            is_slow,
        }
    }

    /// Its status, as last known.
    ///
    /// # Errors
    /// There is none yet, and why.
    pub fn status(&self) -> Answer<VmStatus> {
        let known = self.known();
        let (Some(status), Some(at)) = (&known.status, known.at) else {
            drop(known);
            self.reach()?;
            return Err(ApiError::Unavailable("it was recovered just now: try again".into()));
        };
        let age = at.elapsed();
        Ok(VmStatus {
            state: known.stage.state(),
            state_reason: known.stage.reason().or_else(|| slow(age)),
            age_ms: millis(age),
            ..(**status).clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::swap_dir::SwapDir;
    use crate::host::testing;

    #[test]
    fn the_pilot_hears_of_a_vm_that_misses_memory() {
        let home = tempfile::tempdir().unwrap();
        let daemon = testing::daemon(home.path(), SwapDir::new(home.path(), None).unwrap());
        let piloted = |limit_bytes| Piloted { limit_bytes, ..testing::piloted() };
        testing::publish(&daemon, "web", testing::status(), Some(piloted(Some(1 << 30))));
        let listing = daemon.listed(&"web".parse().unwrap()).unwrap();
        let mut number = 1;
        let mut publish = |refaulted, waits, limit| {
            number += 1;
            let mut status = testing::status();
            (status.limit.refaulted_total_bytes, status.limit.waits) = (refaulted, waits);
            let piloted = Some(piloted(limit));
            listing.publish(VmFigures { number, status, member: None, piloted, times: None })
        };
        let (base, limit) = (testing::status().limit.refaulted_total_bytes, Some(1 << 30));
        assert!(!publish(base + MISSED_BYTES - 1, false, limit));
        assert!(!publish(base + MISSED_BYTES, false, limit), "it has told of the rest before");
        assert!(publish(base + 2 * MISSED_BYTES, false, limit));
        assert!(publish(base + 2 * MISSED_BYTES, true, limit));
        assert!(!publish(base + 3 * MISSED_BYTES, true, None), "the limit is not the pilot's");
        // The next process counts anew.
        assert!(!publish(0, false, limit));
    }

    #[test]
    fn what_a_vm_has_saved_outlives_its_process() {
        let home = tempfile::tempdir().unwrap();
        let daemon = testing::daemon(home.path(), SwapDir::new(home.path(), None).unwrap());
        let listed = || daemon.listed(&"web".parse().unwrap()).unwrap();
        let publish = |number, age_ms| {
            let mut status = testing::status();
            (status.memory_bytes, status.resident_bytes) = (3000, 1000);
            status.age_ms = age_ms;
            let figures = VmFigures { number, status, member: None, piloted: None, times: None };
            testing::publish_all(&daemon, "web", figures);
            listed().seen().saved_byte_seconds
        };
        publish(1, 3000);
        let saved = publish(2, 2000);
        assert!(saved >= 2000.0, "{saved} in a second");
        listed().lose_process("it was killed");
        // The numbers of the next process begin anew.
        let later = publish(1, 1000);
        assert!(later >= saved + 2000.0, "{later} after {saved}");
    }

    #[test]
    fn what_is_not_recovered_says_when_it_is_tried_again() {
        let later = Instant::now() + Duration::from_secs(30);
        let reason = Stage::NotRecovered("it broke".into(), later).reason().unwrap();
        assert_eq!(reason, "it broke; tried again in 30 s");
    }

    #[tokio::test]
    async fn changes_of_a_vm_are_told_among_the_events() {
        let home = tempfile::tempdir().unwrap();
        let daemon = testing::daemon(home.path(), SwapDir::new(home.path(), None).unwrap());
        let publish = |warnings: &[&str], stuck: Option<&str>| {
            let mut status = testing::status();
            status.warnings = warnings.iter().map(|&warning| warning.to_owned()).collect();
            (status.limit.waits, status.limit.stuck) = (stuck.is_some(), stuck.map(str::to_owned));
            testing::publish(&daemon, "web", status, None);
        };
        publish(&["its pages are small"], None);
        publish(&["its pages are small"], Some("the swap file is full"));
        let web = daemon.listed(&"web".parse().unwrap()).unwrap();
        web.lose_process("its process ended (signal: 9 (SIGKILL))");
        web.set(Stage::Recovering);
        web.hear();
        web.set(Stage::Managed);
        publish(&[], None);
        web.set(Stage::NotRecovered("QEMU does not answer".into(), Instant::now()));
        let events = testing::events(&daemon).await;
        assert!(
            events.iter().all(|event| event.vm.as_ref().is_some_and(|vm| vm.as_str() == "web"))
        );
        let told: Vec<String> =
            events.iter().map(|event| format!("{} {}", event.kind, event.text)).collect();
        assert_eq!(
            told,
            [
                "warning appeared: its pages are small",
                "warning appeared: its guest waits: the swap file is full",
                "state being recovered: its process ended (signal: 9 (SIGKILL))",
                "state managed",
                "warning vanished: its pages are small",
                "warning vanished: its guest waits: the swap file is full",
                "state not recovered: QEMU does not answer",
            ]
        );
    }
}
