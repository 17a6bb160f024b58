//! What the pilot remembers of a VM.

use std::time::Duration;

use super::sight::VmSight;

/// How long a limit stays as it is after it was raised for a VM that missed its memory.
const REST_LEAST: Duration = Duration::from_secs(5);
/// The longest such rest.
const REST_MOST: Duration = Duration::from_secs(300);
/// What a VM works with counts as known for this long after it was seen: without a limit nobody
/// sees it.
const KNOWN: Duration = Duration::from_secs(600);
/// Memory that is missed within this time after the limit was lowered is missed because of that.
const BLAME: Duration = Duration::from_secs(30);
/// A limit is raised by so many times what came back in the last look.
const RELIEF_TIMES: u64 = 4;
/// The least by which it is raised: this part of all memory.
const RELIEF_PART: u64 = 50;
const RELIEF_LEAST_BYTES: u64 = 16 << 20;

/// What is remembered of one VM.
#[derive(Default)]
pub(super) struct VmState {
    /// Evicted memory that had come back by the last look, and since then.
    refaulted: Option<(u64, u64)>,
    /// What it works with, and when that was seen last.
    working: Option<(u64, Duration)>,
    /// When the limit was lowered last.
    lowered: Option<Duration>,
    /// When the limit was changed last.
    changed: Option<Duration>,
    /// The limit is not lowered before.
    rests_until: Duration,
    rest: Duration,
    /// When free memory was reclaimed last.
    reclaimed: Option<Duration>,
}

impl VmState {
    /// Notes what is seen of the VM.
    pub fn note(&mut self, vm: &VmSight, now: Duration) {
        let before = self.refaulted.map_or(vm.refaulted_bytes, |(total, _)| total);
        // The next process of a VM counts anew.
        self.refaulted = Some((vm.refaulted_bytes, vm.refaulted_bytes.saturating_sub(before)));
        match vm.working_bytes {
            Some(bytes) => self.working = Some((bytes, now)),
            None if self.working.is_some_and(|(_, at)| now >= at + KNOWN) => self.working = None,
            None => {}
        }
        let is_quiet = |lowered: Duration| now >= lowered + BLAME;
        if self.lowered.is_some_and(is_quiet) && now >= self.rests_until {
            (self.lowered, self.rest) = (None, self.rest / 2);
        }
    }

    /// What it works with, as it was seen lately. `None`: not known.
    pub fn working_bytes(&self) -> Option<u64> {
        self.working.map(|(bytes, _)| bytes)
    }

    /// What came back between the last two looks.
    pub fn refaulted_bytes(&self) -> u64 {
        self.refaulted.map_or(0, |(_, since)| since)
    }

    /// Whether the VM misses memory that its limit keeps from it.
    pub fn misses_memory(&self, vm: &VmSight) -> bool {
        let most = vm.resident_bytes / vm.rule.class.refault_part();
        vm.limit_bytes.is_some() && (vm.waits || self.refaulted_bytes() > most)
    }

    /// By how much the limit of a VM is raised that misses memory.
    pub fn relief_bytes(&self, vm: &VmSight) -> u64 {
        let least = (vm.memory_bytes / RELIEF_PART).max(RELIEF_LEAST_BYTES);
        self.refaulted_bytes().saturating_mul(RELIEF_TIMES).max(least)
    }

    /// Notes that the limit was raised because the VM missed memory. It rests twice as long as the
    /// last time if lowering it was the cause.
    pub fn relieved(&mut self, now: Duration) {
        let is_blamed = self.lowered.is_some_and(|lowered| now < lowered + BLAME);
        let rest = if is_blamed { self.rest * 2 } else { self.rest };
        self.rest = rest.clamp(REST_LEAST, REST_MOST);
        self.rests_until = now + self.rest;
    }

    /// Whether the limit may be lowered.
    pub fn may_lower(&self, now: Duration) -> bool {
        now >= self.rests_until
    }

    /// Notes that the limit was changed.
    pub fn changed(&mut self, now: Duration) {
        self.changed = Some(now);
    }

    /// Whether the limit was changed in this look.
    pub fn has_changed(&self, now: Duration) -> bool {
        self.changed == Some(now)
    }

    /// Notes that the limit was lowered.
    pub fn lowered(&mut self, now: Duration) {
        self.lowered = Some(now);
    }

    /// Whether free memory is to be reclaimed again. If so, this counts as done.
    pub fn is_reclaim_due(&mut self, now: Duration, every: Duration) -> bool {
        let is_due = self.reclaimed.is_none_or(|last| now >= last + every);
        if is_due {
            self.reclaimed = Some(now);
        }
        is_due
    }
}
