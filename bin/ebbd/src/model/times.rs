//! How long took what Ebb does for a VM, as the VM's process publishes it for `GET /metrics`.

use std::iter::once;

use ebb_pager::{GROUP_ENDS_NS, GROUPS, Latency};
use serde::{Deserialize, Serialize};

/// Times of one kind of work, counted by the VM's current process.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Durations {
    /// How many were in each group of [`GROUP_ENDS_NS`], and behind the last.
    pub counts: Vec<u64>,
    /// All of them together, within 7 %.
    pub sum_ns: u64,
}

/// All times of a VM.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Times {
    /// From a touch of a frame without memory to its answer.
    pub missing: Durations,
    /// From a write to a protected frame to its answer.
    pub metadata: Durations,
    /// The part of `missing` that is of evicted frames.
    pub refill: Durations,
    /// Of each request to reclaim, and of each round of automatic reclaim.
    pub reclaim: Durations,
    /// Of installs by HyperAlloc; none: the guest does not share its allocator.
    pub install: Option<Durations>,
}

impl From<&Latency> for Durations {
    fn from(latency: &Latency) -> Durations {
        let (counts, sum_ns) = latency.groups();
        Durations { counts: counts.to_vec(), sum_ns }
    }
}

impl Durations {
    /// How many there were; none: the groups are not those of this release, or not true.
    pub fn count(&self) -> Option<u64> {
        let sum = |sum: u64, count: &u64| sum.checked_add(*count);
        self.counts.iter().try_fold(0, sum).filter(|_| self.counts.len() == GROUPS)
    }

    /// How many were in each group, with the group's end in seconds; `f64::MAX`: it has none.
    pub fn groups(&self) -> Vec<(f64, u64)> {
        let ends = GROUP_ENDS_NS.into_iter().map(in_seconds).chain(once(f64::MAX));
        ends.zip(self.counts.iter().copied()).collect()
    }

    /// All of them together, in seconds.
    pub fn sum_seconds(&self) -> f64 {
        in_seconds(self.sum_ns)
    }
}

impl Times {
    /// How many faults of both kinds were in each group, since the VM's process began.
    pub fn faults(&self) -> [u64; GROUPS] {
        let of = |durations: &Durations, at: usize| durations.counts.get(at).copied().unwrap_or(0);
        std::array::from_fn(|at| of(&self.missing, at).saturating_add(of(&self.metadata, at)))
    }

    /// Whether these figures can be true.
    pub fn adds_up(&self) -> bool {
        let Times { missing, metadata, refill, reclaim, install } = self;
        let all = [missing, metadata, refill, reclaim].into_iter().chain(install);
        all.into_iter().all(|durations| durations.count().is_some())
    }
}

fn in_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
