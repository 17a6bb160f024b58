//! Carrying out the pilot's decisions: one at a time for each VM.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::http::Method;
use ebb_api::{ReclaimReport, ReclaimRequest, VmName};
use ebb_policy::pilot::{Action, Decision};
use ebb_units::Bytes;
use serde::Serialize;
use tokio::time::timeout;

use super::PilotState;
use crate::host::asking::ask;
use crate::host::link::Reply;
use crate::host::registry::Daemon;
use crate::model::api_error::{Answer, ApiError, failed};
use crate::model::figures::VmFigures;
use crate::model::piloted::{Piloted, PlugRequest};
use crate::model::vm_routes::{PILOT_COMPRESSED, PILOT_LIMIT, PILOT_PLUGGED, PILOT_RECLAIM};

/// Longest wait for a VM. It counts as failed then, and may be done all the same.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long free memory that could not be reclaimed is not asked for again.
const IN_VAIN_FOR: Duration = Duration::from_secs(60);
/// How long a VM is left as it is after an act has failed.
const AFTER_FAILURE: Duration = Duration::from_secs(10);

/// A decision that is carried out.
pub(super) struct Act {
    pub number: u64,
    pub decision: Decision,
}

impl Act {
    /// Takes back what the pilot has set, because it is off: one thing at a time. What its guest
    /// has unplugged comes first, unless it `refuses` that. None: there is nothing.
    pub fn lift(state: &PilotState, vm: &VmName, piloted: &Piloted, refuses: bool) -> Option<Act> {
        let plugged = piloted.plugged.filter(|it| it.unplugged_bytes() > 0 && !refuses);
        let compressed = piloted.compressed.filter(|compressed| compressed.is_piloted);
        let action = match (plugged, piloted.limit_bytes, compressed) {
            (Some(it), ..) => Action::Plug { from: it.asked_bytes, to: it.full_bytes },
            (None, Some(bytes), _) => Action::Limit { from: Some(bytes), to: None },
            (None, None, Some(it)) => Action::Compress { from: it.most_bytes, to: None },
            (None, None, None) => return None,
        };
        let decision = Decision {
            vm: vm.to_string(),
            action,
            why: "the pilot is off, or in a dry run".into(),
        };
        Some(Act { number: state.note(&decision, None).unwrap_or(0), decision })
    }
}

/// What is being carried out, by the VM's name.
#[derive(Default)]
pub(super) struct Acts {
    under_way: BTreeMap<VmName, Arc<OnceLock<Outcome>>>,
    in_vain: BTreeMap<VmName, InVain>,
    /// When an act failed last.
    failed: BTreeMap<VmName, Instant>,
    /// When plugging or unplugging failed last. Nothing else has to wait because of that.
    refused: BTreeMap<VmName, Instant>,
}

/// What came of an act.
struct Outcome {
    text: String,
    has_failed: bool,
    /// Whether it was about plugged memory, and failed.
    has_refused: bool,
    /// Free memory that could not be reclaimed, of what was asked for.
    in_vain_bytes: Option<u64>,
}

/// Free memory that was asked for and could not be reclaimed: the guest keeps a reserve, and what
/// is free in small blocks cannot be had.
struct InVain {
    bytes: u64,
    at: Instant,
}

impl Acts {
    /// Whether something is being done for the VM.
    pub fn is_busy(&self, name: &VmName) -> bool {
        self.under_way.contains_key(name)
    }

    /// Whether an act has just failed for the VM. The next one would, too.
    pub fn has_failed(&self, name: &VmName) -> bool {
        self.failed.get(name).is_some_and(|at| at.elapsed() < AFTER_FAILURE)
    }

    /// Whether the VM has just failed to plug or unplug memory.
    pub fn has_refused(&self, name: &VmName) -> bool {
        self.refused.get(name).is_some_and(|at| at.elapsed() < AFTER_FAILURE)
    }

    /// Free memory of the VM that could not be reclaimed lately.
    pub fn in_vain_bytes(&self, name: &VmName) -> u64 {
        let lately = |in_vain: &&InVain| in_vain.at.elapsed() < IN_VAIN_FOR;
        self.in_vain.get(name).filter(lately).map_or(0, |in_vain| in_vain.bytes)
    }

    /// Begins to carry out a decision. While another one is under way for the VM, it is dropped:
    /// the next look decides anew.
    pub fn begin(&mut self, daemon: &Daemon, act: Act) {
        let Ok(name) = act.decision.vm.parse::<VmName>() else { return };
        if self.is_busy(&name) {
            daemon.pilot().came(act.number, "not done: something else was under way".into());
            return;
        }
        let outcome = Arc::<OnceLock<Outcome>>::default();
        tokio::spawn(see_through(daemon.clone(), name.clone(), act, Arc::clone(&outcome)));
        self.under_way.insert(name, outcome);
    }

    /// Whether anything is being done for any VM.
    pub fn is_any_busy(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Notes what came of the acts that have ended. Others know it already.
    pub fn collect(&mut self) {
        self.in_vain.retain(|_, in_vain| in_vain.at.elapsed() < IN_VAIN_FOR);
        self.failed.retain(|_, at| at.elapsed() < AFTER_FAILURE);
        self.refused.retain(|_, at| at.elapsed() < AFTER_FAILURE);
        let Acts { under_way, in_vain, failed, refused } = self;
        under_way.retain(|name, outcome| {
            let Some(outcome) = outcome.get() else { return true };
            if outcome.has_failed {
                failed.insert(name.clone(), Instant::now());
            }
            if outcome.has_refused {
                refused.insert(name.clone(), Instant::now());
            }
            if let Some(bytes) = outcome.in_vain_bytes.filter(|bytes| *bytes > 0) {
                let before = InVain { bytes: 0, at: Instant::now() };
                let in_vain = in_vain.entry(name.clone()).or_insert(before);
                in_vain.bytes = in_vain.bytes.saturating_add(bytes);
            }
            false
        });
    }
}

impl Outcome {
    fn failed(why: impl std::fmt::Display) -> Outcome {
        Outcome { has_failed: true, ..Outcome::done(format!("failed: {why}")) }
    }

    fn done(text: String) -> Outcome {
        Outcome { text, has_failed: false, has_refused: false, in_vain_bytes: None }
    }
}

/// Carries out a decision, and puts on record at once what came of it. The pilot may have skipped
/// this VM meanwhile.
async fn see_through(daemon: Daemon, name: VmName, act: Act, to: Arc<OnceLock<Outcome>>) {
    // In a task of its own: a panic is a failure.
    let doing = tokio::spawn(carry_out(daemon.clone(), name, act.decision.action));
    let outcome = doing.await.unwrap_or_else(Outcome::failed);
    daemon.pilot().came(act.number, outcome.text.clone());
    // Nobody else sets it.
    let _ = to.set(outcome);
    daemon.pilot().hear_of_end();
}

async fn carry_out(daemon: Daemon, name: VmName, action: Action) -> Outcome {
    let doing = async {
        match action {
            Action::Reclaim { bytes } => reclaim(&daemon, &name, bytes).await,
            Action::Limit { to, .. } => set(&daemon, &name, PILOT_LIMIT, &to).await,
            Action::Compress { to, .. } => set(&daemon, &name, PILOT_COMPRESSED, &to).await,
            Action::Plug { from, to } => {
                let request = PlugRequest { from_bytes: from, to_bytes: to };
                set(&daemon, &name, PILOT_PLUGGED, &request).await
            }
        }
    };
    let outcome = match timeout(PATIENCE, doing).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => Outcome::failed(error),
        Err(_) => Outcome::failed(format!("no answer within {} s", PATIENCE.as_secs())),
    };
    match action {
        Action::Plug { .. } => {
            Outcome { has_refused: outcome.has_failed, has_failed: false, ..outcome }
        }
        _ => outcome,
    }
}

async fn reclaim(daemon: &Daemon, name: &VmName, bytes: u64) -> Answer<Outcome> {
    let request = ReclaimRequest { bytes: Some(bytes) };
    let report: ReclaimReport = send(daemon, name, (Method::POST, PILOT_RECLAIM), &request)
        .await?
        .read()
        .map_err(failed("the VM's answer"))?;
    let text = format!("reclaimed {}", Bytes(report.bytes));
    let in_vain_bytes = Some(bytes.saturating_sub(report.bytes));
    Ok(Outcome { in_vain_bytes, ..Outcome::done(text) })
}

/// Sets something that the VM's process has on record.
async fn set(daemon: &Daemon, name: &VmName, uri: &str, what: &impl Serialize) -> Answer<Outcome> {
    let reply = send(daemon, name, (Method::PUT, uri), what).await?;
    let figures = reply.read::<VmFigures>().map_err(failed("the VM's figures"))?;
    if let Some(listing) = daemon.listed(name) {
        daemon.publish(&listing, figures);
    }
    Ok(Outcome::done("done".into()))
}

async fn send(
    daemon: &Daemon,
    name: &VmName,
    (method, uri): (Method, &str),
    what: &impl Serialize,
) -> Answer<Reply> {
    let body = serde_json::to_vec(what).map_err(failed("the pilot"))?;
    let reply = ask(daemon, name, method, uri, body.into()).await?;
    match reply.status.is_success() {
        true => Ok(reply),
        false => Err(ApiError::Failed(reply.refusal().error)),
    }
}
