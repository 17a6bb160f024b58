//! What the host and its VMs were like.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::request::ensure;
use crate::{BadRequest, Top, VmName};

/// Time between two moments on record, in seconds.
pub const HISTORY_STEP_S: u64 = 15;
/// Time between two moments that are kept for longer, in seconds.
pub const HISTORY_LONG_STEP_S: u64 = 300;
/// How long moments are kept, in seconds.
pub const HISTORY_S: u64 = 24 * 3600;
/// How long those are kept that are kept for longer, in seconds.
pub const HISTORY_LONG_S: u64 = 90 * 24 * 3600;
/// Most moments in an answer about all VMs, and in one about one VM.
pub const HISTORY_POINTS_MAX: [u64; 2] = [100, 1000];

/// What of the history to tell.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct HistoryQuery {
    /// Tell of this VM only; null: of all.
    #[serde(default)]
    #[param(required = false, value_type = Option<String>)]
    pub vm: Option<VmName>,
    /// The first second, counted since 1970 (UTC).
    pub from: u64,
    /// The last second, counted since 1970 (UTC).
    pub to: u64,
    /// Time from one moment to the next, in seconds; null: 15 s.
    #[serde(default)]
    #[param(required = false)]
    pub step: Option<u64>,
}

/// What the host and its VMs were like, in moments from the first to the last. Where several moments
/// are on record within a step, they are one moment here: rates are means, times of faults are those
/// of all faults, whoever waited or missed memory at any time did so, and all else is as it was
/// last.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// Time from one moment to the next, in seconds, where all moments are on record.
    pub step_s: u64,
    /// The moments.
    pub points: Vec<Top>,
}

impl HistoryQuery {
    /// Time from one moment to the next, in seconds.
    pub fn step_s(&self) -> u64 {
        self.step.unwrap_or(HISTORY_STEP_S).max(HISTORY_STEP_S)
    }

    /// Most moments in the answer.
    pub fn points_max(&self) -> u64 {
        HISTORY_POINTS_MAX[usize::from(self.vm.is_some())]
    }

    /// Checks that the answer has a bounded number of moments.
    pub fn check(&self) -> Result<(), BadRequest> {
        let HistoryQuery { from, to, .. } = *self;
        ensure(from <= to, || {
            format!("from {from} to {to} is no time: give the earlier one first")
        })?;
        let most = self.points_max();
        let points = (to - from) / self.step_s() + 1;
        ensure(points <= most, || {
            let step = (to - from) / (most - 1) + 1;
            format!("{points} moments are more than {most}: give a step of {step} or more")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_bounded() {
        let check = |vm: Option<&str>, from, to, step| {
            let vm = vm.map(|name| name.parse().unwrap());
            HistoryQuery { vm, from, to, step }.check().map_err(|error| error.to_string())
        };
        assert_eq!(check(None, 0, 99 * 15, None), Ok(()));
        assert_eq!(check(Some("web"), 0, 999 * 15, Some(1)), Ok(()));
        assert_eq!(check(None, 0, u64::MAX, Some(u64::MAX)), Ok(()));
        assert!(check(None, 5, 4, None).unwrap_err().contains("earlier one first"));
        let refused = check(None, 0, 86_400, None).unwrap_err();
        assert_eq!(refused, "5761 moments are more than 100: give a step of 873 or more");
        assert_eq!(check(None, 0, 86_400, Some(873)), Ok(()));
    }
}
