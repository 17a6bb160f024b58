//! Events: what happens to VMs, as `GET /v1/events` tells it.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::choice::choice;
use crate::{BadRequest, ErrorCode, JobKind, JobState, PilotStage, VmName};

/// Longest text of an event, in bytes. The rest is cut off.
pub const EVENT_TEXT_BYTES_MAX: usize = 1024;

choice! {
    /// What an event is about. Later releases may add types.
    EventType {
        /// What Ebb does with a VM has changed.
        State = "state",
        /// The daemon refused a command, or failed to carry it out.
        Refusal = "refusal",
        /// The pilot decided something, and this came of it.
        Decision = "decision",
        /// A warning about a VM has appeared or vanished.
        Warning = "warning",
        /// The pilot sees that the host is shorter of memory than before, or less short.
        Stage = "stage",
        /// A job was asked for, or has ended.
        Job = "job",
        /// Events may be missing here.
        Lost = "lost",
    }
}

choice! {
    /// What Ebb does with a VM from now on.
    VmChange {
        /// Ebb has started it, and manages it.
        Started = "started",
        /// It ran already, and Ebb manages it now.
        Attached = "attached",
        /// Its process has ended, and the next one is about to manage it.
        Recovering = "recovering",
        /// Its process manages it, again or still.
        Managed = "managed",
        /// No process manages it now. Ebb tries again.
        NotRecovered = "not_recovered",
        /// It was detached: its guest runs on without Ebb.
        Detached = "detached",
        /// Its QEMU has ended.
        Ended = "ended",
    }
}

choice! {
    /// What the pilot decided to do with a VM.
    PilotAction {
        /// Reclaim free memory.
        Reclaim = "reclaim",
        /// Set, change or lift its limit.
        Limit = "limit",
        /// Change the most memory that its compressed pages may take.
        Compress = "compress",
        /// Have its guest plug or unplug memory.
        Plug = "plug",
    }
}

/// Something that happened. The member that is named as the type has the figures; the others are
/// absent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number, greater than that of each earlier event, also of an earlier daemon. Of type
    /// `lost`: events after this number may be missing.
    pub number: u64,
    /// When it happened, by RFC 3339, in UTC: `2026-11-28T14:05:12.345Z`.
    #[schema(format = DateTime)]
    pub time: String,
    /// What it is about.
    #[serde(rename = "type")]
    pub kind: EventType,
    /// Name of the VM; null: it is about no VM, or about none that is known.
    #[schema(value_type = Option<String>)]
    pub vm: Option<VmName>,
    /// One line that says what happened.
    pub text: String,
    /// Figures of a change of state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<StateFigures>,
    /// Figures of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalFigures>,
    /// Figures of a decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<DecisionFigures>,
    /// Figures of a warning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<WarningFigures>,
    /// Figures of a change of stage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<StageFigures>,
    /// Figures of a job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobFigures>,
    /// Figures of lost events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<LostFigures>,
}

/// A VM's new state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct StateFigures {
    /// What Ebb does with the VM from now on.
    pub change: VmChange,
    /// Why; null: nothing is known but that.
    pub reason: Option<String>,
}

/// A command that was refused or has failed. Questions (GET) are not among them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct RefusalFigures {
    /// The request's method.
    pub method: String,
    /// The request's path.
    pub path: String,
    /// Why, for programs.
    pub code: ErrorCode,
    /// Why, in one line.
    pub error: String,
}

/// A decision of the pilot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct DecisionFigures {
    /// Its number, as the pilot's status has it.
    pub number: u64,
    /// What was to be done.
    pub action: PilotAction,
    /// How much free memory was to be reclaimed; null: it is about something else.
    pub bytes: Option<u64>,
    /// The limit, the most compressed memory, or what was to be plugged, before; null: none, or it
    /// is about free memory.
    pub from_bytes: Option<u64>,
    /// The same from now on; null: none, the daemon's option, or it is about free memory.
    pub to_bytes: Option<u64>,
    /// Why, with the figures.
    pub why: String,
    /// What came of it.
    pub outcome: String,
}

/// A warning that has appeared or vanished.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct WarningFigures {
    /// Whether it has appeared; else it has vanished.
    pub appeared: bool,
    /// The warning, as the VM's status has it.
    pub warning: String,
}

/// How short of memory the host is, for the pilot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct StageFigures {
    /// The stage before.
    pub from: PilotStage,
    /// The stage from now on.
    pub to: PilotStage,
    /// The host's figures.
    pub host: String,
}

/// A job that was asked for, or has ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct JobFigures {
    /// Its number.
    pub id: u64,
    /// What it does.
    pub kind: JobKind,
    /// How far it is.
    pub state: JobState,
}

/// Events that may be missing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct LostFigures {
    /// The last number that may be missing. The first one is that behind the number of this event.
    pub last: u64,
}

/// Which events to tell.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct EventsQuery {
    /// Only those of this VM; it need not exist. Without it: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub vm: Option<VmName>,
    /// Only those of these types, with commas between them. Without it: all.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub types: Option<String>,
    /// Only those after this number. Without it: all that the daemon still has. The header
    /// `Last-Event-ID` counts before this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// Whether the stream goes on with what happens from now on. Without it: yes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow: Option<bool>,
}

impl EventsQuery {
    /// The types that are asked for; empty: all.
    ///
    /// # Errors
    /// One is no type.
    pub fn types(&self) -> Result<Vec<EventType>, BadRequest> {
        let words = self.types.iter().flat_map(|types| types.split(','));
        words.map(|word| word.trim().parse::<EventType>().map_err(BadRequest::of)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_they_are_written() {
        let read = |types: &str| EventsQuery { types: Some(types.into()), ..Default::default() };
        assert_eq!(EventsQuery::default().types().expect("all"), []);
        let both = read("state, decision").types().expect("two");
        assert_eq!(both, [EventType::State, EventType::Decision]);
        for wrong in ["", "state,", "states"] {
            let why = read(wrong).types().expect_err("no type").to_string();
            assert!(why.contains("is not one of state, refusal, decision"), "{wrong}: {why}");
        }
    }
}
