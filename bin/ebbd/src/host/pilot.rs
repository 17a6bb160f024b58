//! The pilot of a host: looks each second at the host and its VMs, and sooner if a VM misses memory,
//! decides by `ebb-policy`, and tells the VMs' processes. See `docs/pilot.md`.

mod act;
mod attach;
mod record;
mod sight;
mod status;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::{DecisionFigures, PilotAction, PilotMode, PilotSight, VmName};
use ebb_policy::pilot::{Action, Decision, HostSight, Pilot, PluggedSight, Stage, VmRule, VmSight};
use ebb_policy::pressure::HostMemory;
use ebb_units::Bytes;
use tokio::sync::Notify;

use self::act::{Act, Acts};
use self::attach::Attacher;
use super::apart::apart;
use super::events::{EventLog, News};
use super::registry::Daemon;
use crate::system::host_memory::HostReader;

pub use self::record::{PilotRecord, on_record};
pub use self::status::{Glance, follow, last_sight, rule, set, status};

/// Interval between two looks.
const EVERY: Duration = Duration::from_secs(1);
/// Pause before the next look at VMs that miss memory: nine times as long as the last look took,
/// within these bounds. A look takes long on a busy host, too, and just there relief must not wait.
const GLANCE_PAUSE: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(250)];
/// Decisions that are remembered.
const DECISIONS_MOST: usize = 256;
/// In a dry run nothing changes, so each look decides the same. A decision of the same kind for the
/// same VM is noted again after this time only.
const AGAIN: Duration = Duration::from_secs(60);

/// What is known of the pilot without waiting for it. It tells of decisions among the events.
pub struct PilotState {
    known: Mutex<Known>,
    /// Told when a VM misses memory.
    missed: Notify,
    /// Whether the last look may have skipped a VM that misses memory, as something was being done
    /// for it.
    is_owed: AtomicBool,
    /// Whether guests are to tell what they need, as they may have to unplug memory.
    is_watching: AtomicBool,
    events: Arc<EventLog>,
}

#[derive(Default)]
struct Known {
    /// The last look; none: the pilot is off, or has not looked yet.
    last: Option<Looked>,
    decisions: VecDeque<Noted>,
    count: u64,
}

/// What a look saw.
struct Looked {
    stage: Stage,
    /// The host's figures.
    host: String,
    sight: PilotSight,
}

/// A decision on record.
#[derive(Clone)]
struct Noted {
    number: u64,
    at: Instant,
    decision: Decision,
    /// What came of it; none: nothing yet.
    outcome: Option<String>,
}

impl PilotState {
    /// A pilot that has not looked yet, and where it tells what it does.
    pub fn new(events: &Arc<EventLog>) -> PilotState {
        let (known, missed, is_owed) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
        let (is_watching, events) = (AtomicBool::new(false), Arc::clone(events));
        PilotState { known, missed, is_owed, is_watching, events }
    }

    /// Whether guests are to tell what they need, as they may have to unplug memory.
    pub fn is_watching(&self) -> bool {
        self.is_watching.load(Relaxed)
    }

    /// Has the pilot look soon, since a VM misses memory.
    pub fn hear_of_missed(&self) {
        self.missed.notify_one();
    }

    /// Has the pilot look soon if it may have skipped a VM that misses memory: what was being done
    /// for a VM has ended.
    fn hear_of_end(&self) {
        if self.is_owed.swap(false, AcqRel) {
            self.hear_of_missed();
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // The state is whole between any two statements that change it.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn saw(&self, looked: Option<Looked>) {
        self.known().last = looked;
    }

    /// Puts a decision on record. Returns its number; none: a dry run has noted the like.
    fn note(&self, decision: &Decision, outcome: Option<&str>) -> Option<u64> {
        let (mut known, now) = (self.known(), Instant::now());
        let is_alike = |noted: &&Noted| {
            let same_kind = std::mem::discriminant(&noted.decision.action)
                == std::mem::discriminant(&decision.action);
            noted.decision.vm == decision.vm && same_kind
        };
        let is_recent = |noted: &Noted| now.duration_since(noted.at) < AGAIN;
        let is_dry = outcome.is_some();
        if is_dry && known.decisions.iter().rev().find(is_alike).is_some_and(is_recent) {
            return None;
        }
        known.count += 1;
        if known.decisions.len() == DECISIONS_MOST {
            known.decisions.pop_front();
        }
        let number = known.count;
        let (decision, outcome) = (decision.clone(), outcome.map(str::to_owned));
        let noted = Noted { number, at: now, decision, outcome };
        self.tell(&noted);
        known.decisions.push_back(noted);
        Some(number)
    }

    /// Notes what came of a decision.
    fn came(&self, number: u64, outcome: String) {
        let mut known = self.known();
        if let Some(noted) = known.decisions.iter_mut().find(|noted| noted.number == number) {
            noted.outcome = Some(outcome);
            self.tell(noted);
        }
    }

    /// Tells of a decision of which something came.
    fn tell(&self, noted: &Noted) {
        let (vm, action) = (noted.decision.vm.parse().ok(), noted.decision.action.to_string());
        if let Some(figures) = noted.figures() {
            self.events.publish(vm.as_ref(), News::Decision(action, figures));
        }
    }
}

impl Noted {
    /// What the event of this decision tells; none: nothing came of it yet.
    fn figures(&self) -> Option<DecisionFigures> {
        let (action, bytes, from_bytes, to_bytes) = match self.decision.action {
            Action::Reclaim { bytes } => (PilotAction::Reclaim, Some(bytes), None, None),
            Action::Limit { from, to } => (PilotAction::Limit, None, from, to),
            Action::Compress { from, to } => (PilotAction::Compress, None, Some(from), to),
            Action::Plug { from, to } => (PilotAction::Plug, None, Some(from), Some(to)),
        };
        let (number, why) = (self.number, self.decision.why.clone());
        let outcome = self.outcome.clone()?;
        Some(DecisionFigures { number, action, bytes, from_bytes, to_bytes, why, outcome })
    }
}

/// Keeps the pilot of all VMs. `stall_percent`: see [`HostReader::open`].
pub async fn keep(daemon: Daemon, stall_percent: Option<u32>) {
    let mut interval = tokio::time::interval(EVERY);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut keeper = Keeper::new(daemon, stall_percent);
    let mut before: Option<String> = None;
    let mut glance_at = tokio::time::Instant::now();
    loop {
        let missed = async {
            keeper.daemon.pilot().missed.notified().await;
            tokio::time::sleep_until(glance_at).await;
        };
        let scope = tokio::select! {
            _ = interval.tick() => Scope::All,
            () = missed => Scope::Relief,
        };
        let began = tokio::time::Instant::now();
        let error = keeper.look(scope).await.err().map(|error| error.to_string());
        let [least, most] = GLANCE_PAUSE;
        glance_at = tokio::time::Instant::now() + (began.elapsed() * 9).clamp(least, most);
        if let Some(error) = error.as_ref().filter(|error| before.as_ref() != Some(*error)) {
            tracing::warn!("the pilot: the host's memory: {error}");
        }
        before = error;
    }
}

/// What a look is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    All,
    /// Only for VMs that miss memory.
    Relief,
}

struct Keeper {
    daemon: Daemon,
    stall_percent: Option<u32>,
    pilot: Pilot,
    /// Opened once the pilot is on, and the part of the time in which tasks may wait, in percent.
    reader: Option<(HostReader, Option<u32>)>,
    acts: Acts,
    attacher: Attacher,
    stage: Stage,
    began: Instant,
}

impl Keeper {
    fn new(daemon: Daemon, stall_percent: Option<u32>) -> Keeper {
        Keeper {
            daemon,
            stall_percent,
            pilot: Pilot::default(),
            reader: None,
            acts: Acts::default(),
            attacher: Attacher::default(),
            stage: Stage::default(),
            began: Instant::now(),
        }
    }

    async fn look(&mut self, scope: Scope) -> io::Result<()> {
        let state = self.daemon.pilot();
        let settings = self.daemon.pilot_record().settings();
        // What ends from here on has the pilot look again. A swap: what has just ended either finds
        // the new value, or is found by `collect`.
        state.is_owed.swap(settings.mode == PilotMode::On, AcqRel);
        self.acts.collect();
        if !self.acts.is_any_busy() {
            state.is_owed.store(false, Release);
        }
        if settings.mode == PilotMode::Off {
            state.saw(None);
            state.is_watching.store(false, Relaxed);
            (self.pilot, self.reader) = (Pilot::default(), None);
            self.lift();
            return Ok(());
        }
        let rule = settings.host_rule(self.stall_percent);
        if settings.attach && settings.mode == PilotMode::On && scope == Scope::All {
            self.attacher.look(&self.daemon).await;
        }
        let memory = self.read(settings.stall_percent(self.stall_percent)).await?;
        let sights = self.sights(|name| settings.rule(name));
        let now = self.began.elapsed();
        let host = HostSight { memory: &memory, swap_bytes: self.swap_bytes() };
        let decisions = match scope {
            Scope::All => self.pilot.look(now, rule, host, &sights),
            Scope::Relief => self.pilot.relieve(now, rule, host, &sights),
        };
        self.tell_stage(&memory);
        self.daemon.pilot().is_watching.store(self.stage > Stage::Ample, Relaxed);
        let sight = sight::for_clients(now, host, &sights);
        let swap = { settings.swap_max_bytes }
            .map(|most| format!(", swap files {} of {}", Bytes(host.swap_bytes), Bytes(most)));
        let (stage, host) = (self.stage, memory.to_string() + &swap.unwrap_or_default());
        self.daemon.pilot().saw(Some(Looked { stage, host, sight }));
        for decision in decisions {
            self.carry_out(decision, settings.mode);
        }
        if settings.mode == PilotMode::DryRun {
            self.lift();
        }
        Ok(())
    }

    /// Reads the host's memory away from the threads that answer requests.
    async fn read(&mut self, percent: Option<u32>) -> io::Result<HostMemory> {
        let reader = self.reader.take().filter(|(_, before)| *before == percent);
        let (reader, memory) = apart(move || {
            let mut reader = reader.map_or_else(|| HostReader::open(percent), |(reader, _)| reader);
            let memory = reader.read(false);
            (reader, memory)
        })
        .await?;
        self.reader = Some((reader, percent));
        memory
    }

    /// What all swap files take, as a VM's process last saw it.
    fn swap_bytes(&self) -> u64 {
        let each = self.daemon.listings().into_iter().filter_map(|(_, listing)| listing.piloted());
        each.map(|(status, _)| status.limit.all_swap_files_bytes).max().unwrap_or(0)
    }

    /// The VMs as they published themselves last. A VM for which something is being done is left
    /// as it is.
    fn sights(&self, rule: impl Fn(&VmName) -> VmRule) -> Vec<VmSight> {
        let each = self.daemon.listings().into_iter();
        let each = each.filter_map(|(name, listing)| Some((name, listing.piloted()?)));
        each.map(|(name, (status, piloted))| {
            let sight = sight::of(&name, &status, &piloted, rule(&name));
            let in_vain_bytes = self.acts.in_vain_bytes(&name);
            let spare_bytes = sight.spare_bytes.saturating_sub(in_vain_bytes);
            let (is_busy, has_failed) = (self.acts.is_busy(&name), self.acts.has_failed(&name));
            // Whoever cannot do anything else now need not unplug memory instead.
            let unplugs = |it: PluggedSight| it.may_unplug && !has_failed;
            let plugged = sight.plugged.filter(|_| !is_busy && !self.acts.has_refused(&name));
            let plugged = plugged.map(|it| PluggedSight { may_unplug: unplugs(it), ..it });
            let sight = VmSight { spare_bytes, plugged, ..sight };
            match is_busy || has_failed {
                true => VmSight { may_reclaim: false, may_limit: false, ..sight },
                false => sight,
            }
        })
        .collect()
    }

    /// Logs a change of the stage.
    fn tell_stage(&mut self, memory: &HostMemory) {
        let before = std::mem::replace(&mut self.stage, self.pilot.stage());
        if before != self.stage {
            tracing::info!("the pilot: the host is {} now, was {before}: {memory}", self.stage);
            let (from, to) = (status::name_of(before), status::name_of(self.stage));
            let host = memory.to_string();
            self.daemon.events().publish(None, News::Stage { from, to, host });
        }
    }

    fn carry_out(&mut self, decision: Decision, mode: PilotMode) {
        let state = self.daemon.pilot();
        let outcome = (mode == PilotMode::DryRun).then_some("not done: dry run");
        let Some(number) = state.note(&decision, outcome) else { return };
        tracing::debug!("the pilot: {decision}");
        if mode == PilotMode::On {
            self.acts.begin(&self.daemon, Act { number, decision });
        }
    }

    /// Takes back what the pilot has set: it acts no more.
    fn lift(&mut self) {
        for (name, listing) in self.daemon.listings() {
            if self.acts.is_busy(&name) || self.acts.has_failed(&name) {
                continue;
            }
            let piloted = listing.piloted().map(|(_, piloted)| piloted);
            let refuses = self.acts.has_refused(&name);
            let lift = |piloted| Act::lift(self.daemon.pilot(), &name, &piloted, refuses);
            if let Some(act) = piloted.and_then(lift) {
                self.acts.begin(&self.daemon, act);
            }
        }
    }
}
