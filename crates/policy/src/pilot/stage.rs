//! How short of memory a host is.
//!
//! ```text
//! available   0 ...... reserve/2 ...... reserve ...... 2 * reserve ......>
//!             critical           short          tight              ample
//! ```
//!
//! A stage that is worse begins at once. A better one begins after [`CALM`], and only with an
//! eighth more than at its border, so that what the pilot itself changes does not turn it to and
//! fro. The stage changes by one then.

use std::fmt;
use std::time::Duration;

use super::rule::HostRule;
use crate::pressure::{Budget, HostMemory};

/// How long the host must be better off before its stage is.
const CALM: Duration = Duration::from_secs(10);
/// A better stage begins this part above the border at which it ends.
const MARGIN_PART: u64 = 8;
/// Waiting tasks count while less than so many times the reserve is available.
const STALL_TIMES: u64 = 4;

/// How short of memory a host is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Stage {
    /// Memory is given back to VMs.
    #[default]
    Ample,
    /// Less than twice the reserve is available: what VMs do not use is taken.
    Tight,
    /// Less than the reserve is available, or tasks wait for memory.
    Short,
    /// Less than half of the reserve is available: batch VMs lose memory that they work with.
    Critical,
}

impl Stage {
    fn better(self) -> Stage {
        match self {
            Stage::Critical => Stage::Short,
            Stage::Short => Stage::Tight,
            _ => Stage::Ample,
        }
    }

    /// The most that a VM gives in a second: this part of its memory.
    pub(super) fn rate_part(self) -> u64 {
        match self {
            Stage::Critical => 6,
            Stage::Short => 25,
            _ => 100,
        }
    }

    /// Time between two rounds over a VM's free memory.
    pub(super) fn reclaim_every(self) -> Duration {
        Duration::from_secs(match self {
            Stage::Ample => 10,
            Stage::Tight => 5,
            // In between, the limit may change: one thing is done at a time.
            _ => 3,
        })
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Ample => "ample",
            Stage::Tight => "tight",
            Stage::Short => "short",
            Stage::Critical => "critical",
        })
    }
}

/// The stage of a host over time.
#[derive(Default)]
pub(super) struct StageWatch {
    stage: Stage,
    /// Since when the host has been better off than its stage says.
    better_since: Option<Duration>,
}

impl StageWatch {
    pub fn stage(&self) -> Stage {
        self.stage
    }

    pub fn look(&mut self, now: Duration, rule: HostRule, host: &HostMemory) -> Stage {
        if stage_of(rule, host, 0) >= self.stage {
            self.stage = stage_of(rule, host, 0);
            self.better_since = None;
        } else if stage_of(rule, host, MARGIN_PART) >= self.stage {
            self.better_since = None;
        } else if now >= *self.better_since.get_or_insert(now) + CALM {
            self.stage = self.stage.better();
            self.better_since = Some(now);
        }
        self.stage
    }
}

/// The stage by these figures. `margin_part`: borders lie this part higher; 0: as they are.
fn stage_of(rule: HostRule, host: &HostMemory, margin_part: u64) -> Stage {
    // At most half of the way to all memory, so that the stage can end.
    let wider = |border: u64, budget: &Budget| {
        let most = budget.total_bytes.saturating_sub(border) / 2;
        border.saturating_add(border.checked_div(margin_part).unwrap_or(0).min(most))
    };
    let of_budget = |budget: &Budget| {
        let reserve = rule.reserve.of(budget.total_bytes);
        let is_below = |border: u64| budget.available_bytes < wider(border, budget);
        match () {
            () if is_below(reserve / 2) => Stage::Critical,
            () if is_below(reserve) => Stage::Short,
            () if is_below(reserve.saturating_mul(2)) => Stage::Tight,
            () => Stage::Ample,
        }
    };
    let near = |budget: &Budget| {
        let reserve = rule.reserve.of(budget.total_bytes);
        budget.available_bytes < wider(reserve.saturating_mul(STALL_TIMES), budget)
    };
    let waits = match (host.stall_permille, rule.stall_permille) {
        // Borders that lie higher are reached by fewer waits.
        (Some(stall), Some(most)) => stall >= if margin_part > 0 { most / 2 } else { most },
        _ => false,
    };
    let by_waits = if waits && host.bounds().any(near) { Stage::Short } else { Stage::Ample };
    host.bounds().map(of_budget).max().unwrap_or_default().max(by_waits)
}
