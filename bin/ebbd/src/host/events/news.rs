//! News, and the event that tells them.

use ebb_api::{
    DecisionFigures, EVENT_TEXT_BYTES_MAX, Event, EventType, JobFigures, LostFigures, PilotStage,
    RefusalFigures, StageFigures, StateFigures, VmChange, VmName, WarningFigures,
};
use jiff::Timestamp;

/// Something that clients may want to know.
pub enum News {
    /// What Ebb does with a VM has changed, and why.
    State(VmChange, Option<String>),
    /// A command was refused.
    Refusal(RefusalFigures),
    /// The pilot decided this, as it words it, and this came of it.
    Decision(String, DecisionFigures),
    /// A warning has appeared or vanished.
    Warning(WarningFigures),
    /// The pilot's stage has changed, with the host's figures.
    Stage {
        /// The stage before.
        from: PilotStage,
        /// The stage from now on.
        to: PilotStage,
        /// The host's figures.
        host: String,
    },
    /// A job was asked for, or has ended, and what came of it.
    Job(JobFigures, String),
    /// Events up to this number may be missing.
    Lost {
        /// The number.
        last: u64,
    },
}

impl News {
    /// The event of this number that happens now.
    pub(super) fn event(self, number: u64, vm: Option<VmName>) -> Event {
        let time = format!("{:.3}", Timestamp::now());
        let blank = |kind, text: String| Event {
            number,
            time,
            kind,
            vm,
            text: bounded(text),
            state: None,
            refusal: None,
            decision: None,
            warning: None,
            stage: None,
            job: None,
            lost: None,
        };
        match self {
            News::State(change, reason) => {
                let reason = reason.map(bounded);
                let text = with_reason(words(change), reason.as_deref());
                let state = Some(StateFigures { change, reason });
                Event { state, ..blank(EventType::State, text) }
            }
            News::Refusal(figures) => {
                let RefusalFigures { method, path, code, error } = figures;
                let (path, error) = (bounded(path), bounded(error));
                let text = format!("{method} {path}: {code}: {error}");
                let refusal = Some(RefusalFigures { method: bounded(method), path, code, error });
                Event { refusal, ..blank(EventType::Refusal, text) }
            }
            News::Decision(action, figures) => {
                let (why, outcome) = (bounded(figures.why), bounded(figures.outcome));
                let text = format!("{action} ({why}): {outcome}");
                let decision = Some(DecisionFigures { why, outcome, ..figures });
                Event { decision, ..blank(EventType::Decision, text) }
            }
            News::Warning(WarningFigures { appeared, warning }) => {
                let warning = bounded(warning);
                let text = format!("{}: {warning}", if appeared { "appeared" } else { "vanished" });
                let warning = Some(WarningFigures { appeared, warning });
                Event { warning, ..blank(EventType::Warning, text) }
            }
            News::Stage { from, to, host } => {
                let host = bounded(host);
                let text = format!("the host is {to} now, was {from}: {host}");
                let stage = Some(StageFigures { from, to, host });
                Event { stage, ..blank(EventType::Stage, text) }
            }
            News::Job(figures, what) => {
                let JobFigures { id, kind, state } = figures;
                let what = if what.is_empty() { what } else { format!(": {what}") };
                let text = format!("{kind}, job {id}: {state}{what}");
                Event { job: Some(figures), ..blank(EventType::Job, text) }
            }
            News::Lost { last } => {
                let text = format!(
                    "events up to number {last} may be missing: ebbd no longer has all of them"
                );
                Event { lost: Some(LostFigures { last }), ..blank(EventType::Lost, text) }
            }
        }
    }
}

fn with_reason(words: &str, reason: Option<&str>) -> String {
    reason.map_or_else(|| words.to_owned(), |reason| format!("{words}: {reason}"))
}

fn words(change: VmChange) -> &'static str {
    match change {
        VmChange::Started => "started",
        VmChange::Attached => "attached",
        VmChange::Recovering => "being recovered",
        VmChange::Managed => "managed",
        VmChange::NotRecovered => "not recovered",
        VmChange::Detached => "detached",
        VmChange::Ended => "ended",
    }
}

/// As much of the text as an event has.
fn bounded(mut text: String) -> String {
    let most = text.len().min(EVENT_TEXT_BYTES_MAX);
    let end = (0..=most).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.truncate(end);
    text.shrink_to_fit();
    text
}
