//! What the pilot remembers of a VM.

use std::time::Duration;

use super::plug_state::PlugState;
use super::sight::VmSight;

/// How long a limit stays as it is after it was raised for a VM that missed its memory.
const REST_LEAST: Duration = Duration::from_secs(5);
/// The longest such rest.
const REST_MOST: Duration = Duration::from_secs(300);
/// The longest rest while the host's stage is critical.
const REST_CRITICAL: Duration = Duration::from_secs(30);
/// What a VM works with counts as known for this long after it was seen: without a limit nobody
/// sees it. A VM that is not seen for as long is forgotten.
const KNOWN: Duration = Duration::from_secs(600);
/// Memory that is missed within this time after the limit was lowered is missed because of that.
const BLAME: Duration = Duration::from_secs(30);
/// A VM that has missed no memory for this long may have more than it works with.
const QUIET: Duration = Duration::from_secs(10);
/// A VM above its limit is on its way down if it took less within this time.
const PROGRESS: Duration = Duration::from_secs(5);
/// A limit is raised by so many times what came back.
const RELIEF_TIMES: u64 = 4;
const RELIEF_LEAST_BYTES: u64 = 16 << 20;
/// A VM above its limit by more than this part of its memory has yet to give what was asked for.
const EXCESS_PART: u64 = 64;
/// Compressed memory does not grow for this long after its size was changed.
const COMPRESSED_REST: Duration = Duration::from_secs(60);
/// A limit is in a VM's way if the VM takes no less than this part of its memory below it: eviction
/// goes down to a mark below the limit.
const NEAR_PART: u64 = 16;
/// A guest's word on its free memory counts if this part of it could be reclaimed the last time.
const CREDIT_PART: u64 = 4;

/// What is remembered of one VM.
#[derive(Default)]
pub(super) struct VmState {
    /// When it was seen last.
    seen: Duration,
    /// Evicted memory that had come back by then, in all.
    refaulted: Option<u64>,
    /// What came back since the last look that could do something about it, and when that was.
    missed: (u64, Duration),
    /// Whether that look has been made.
    is_judged: bool,
    /// When it missed memory last.
    missed_at: Option<Duration>,
    /// Probes since then, one soon after the other.
    probes: u32,
    /// What the last probe took from it for others, and when that was.
    owed: Option<(u64, Duration)>,
    /// What it works with, and when that was seen last.
    working: Option<(u64, Duration)>,
    /// What it takes above its limit, and when that became less.
    excess: (u64, Duration),
    /// When the limit was lowered last; `None`: that was blamed already, or long ago.
    lowered: Option<Duration>,
    /// When something was decided last.
    decided: Option<Duration>,
    /// When it was relieved last, and how long its limit rests.
    relieved: Option<Duration>,
    rest: Duration,
    /// When the size of its compressed memory was changed last.
    compressed: Option<Duration>,
    /// When free memory was to be reclaimed last, how much, and what was resident then.
    reclaimed: Option<(Duration, u64, u64)>,
    /// Its plugged memory.
    pub plug: PlugState,
}

impl VmState {
    /// Notes what is seen of the VM.
    pub fn note(&mut self, vm: &VmSight, now: Duration) {
        if std::mem::take(&mut self.is_judged) {
            self.missed = (0, self.seen);
        }
        // The next process of a VM counts anew.
        let before = self.refaulted.replace(vm.refaulted_bytes).unwrap_or(vm.refaulted_bytes);
        self.missed.0 = self.missed.0.saturating_add(vm.refaulted_bytes.saturating_sub(before));
        match vm.working_bytes {
            Some(bytes) => self.working = Some((bytes, now)),
            None if self.working.is_some_and(|(_, at)| now >= at + KNOWN) => self.working = None,
            None => {}
        }
        let excess = vm.excess_bytes();
        if excess == 0 || excess < self.excess.0 {
            self.excess.1 = now;
        }
        self.excess.0 = excess;
        self.plug.note(vm, now);
        self.seen = now;
        if self.lowered.is_some_and(|lowered| now >= lowered + BLAME) {
            // It was low enough for some time.
            (self.lowered, self.rest) = (None, self.rest / 2);
            self.probes = 0;
        }
        if self.misses_memory(vm) {
            self.begin_probes_anew(now);
        }
    }

    /// Notes that it misses memory: the next probe is a small one.
    fn begin_probes_anew(&mut self, now: Duration) {
        (self.missed_at, self.probes) = (Some(now), 0);
    }

    /// Whether the VM was not seen for so long that it counts as another one.
    pub fn is_old(&self, now: Duration) -> bool {
        now >= self.seen + KNOWN
    }

    /// What it works with, as it was seen lately. `None`: not known.
    pub fn working_bytes(&self) -> Option<u64> {
        self.working.map(|(bytes, _)| bytes)
    }

    /// What came back since the last look that could do something about it.
    pub fn missed_bytes(&self) -> u64 {
        self.missed.0
    }

    /// Notes that this whole look could do something about what the VM misses. Until the next one,
    /// what it misses adds up.
    pub fn judged(&mut self) {
        self.is_judged = true;
    }

    /// Whether the VM misses memory that its limit keeps from it.
    pub fn misses_memory(&self, vm: &VmSight) -> bool {
        let seconds = self.seen.saturating_sub(self.missed.1).as_secs().max(1);
        let most = vm.resident_bytes / vm.rule.class.refault_part();
        vm.limit_bytes.is_some() && (vm.waits || self.missed.0 > most.saturating_mul(seconds))
    }

    /// Whether the limit is raised because the guest is about to run out of memory by its own word,
    /// and what it misses bears that out: a guest may lie, and one that has used all of its memory
    /// and rests says the same. The limit must be in its way, and it was not relieved just now.
    pub fn may_ease(&self, vm: &VmSight, now: Duration) -> bool {
        let least = vm.limit_bytes.unwrap_or(0).saturating_sub(vm.memory_bytes / NEAR_PART);
        let is_due = self.relieved.is_none_or(|relieved| now >= relieved + REST_LEAST);
        let is_borne_out = self.missed.0 > 0 || vm.waits;
        vm.pressed().is_some() && is_borne_out && vm.resident_bytes >= least && is_due
    }

    /// By how much the limit of a VM is raised that misses memory.
    pub fn relief_bytes(&self, vm: &VmSight) -> u64 {
        let least = (vm.memory_bytes / vm.rule.class.relief_part()).max(RELIEF_LEAST_BYTES);
        self.missed.0.saturating_mul(RELIEF_TIMES).max(least)
    }

    /// What the VM is about to give: it is above its limit, and on its way down, or its guest is
    /// about to unplug memory.
    pub fn coming_bytes(&self, now: Duration) -> u64 {
        let lately = |since: Duration| now < since + PROGRESS;
        let is_on_its_way = lately(self.excess.1) || self.decided.is_some_and(lately);
        let above_limit = if is_on_its_way { self.excess.0 } else { 0 };
        above_limit.saturating_add(self.plug.coming_bytes(now))
    }

    /// Notes that the limit was raised because the VM missed memory. It rests twice as long as the
    /// last time if lowering it was the cause.
    pub fn relieved(&mut self, now: Duration) {
        let is_blamed = self.lowered.take().is_some_and(|lowered| now < lowered + BLAME);
        let rest = if is_blamed { self.rest * 2 } else { self.rest };
        self.rest = rest.clamp(REST_LEAST, REST_MOST);
        self.relieved = Some(now);
        // What it missed counts once.
        self.is_judged = true;
        self.owed = None;
        self.begin_probes_anew(now);
    }

    /// Whether the VM has missed no memory for a while.
    pub fn is_quiet(&self, now: Duration) -> bool {
        self.missed_at.is_none_or(|missed| now >= missed + QUIET)
    }

    /// Whether the limit rests because it was raised for the VM.
    pub fn rests(&self, now: Duration, is_critical: bool) -> bool {
        let rest = if is_critical { self.rest.min(REST_CRITICAL) } else { self.rest };
        self.relieved.is_some_and(|relieved| now < relieved + rest)
    }

    /// Whether the limit may be lowered: it does not rest, and nothing is missed or yet to come.
    pub fn may_lower(&self, vm: &VmSight, now: Duration, is_critical: bool) -> bool {
        !self.rests(now, is_critical) && !self.misses_memory(vm) && self.has_given(vm)
    }

    /// Whether it is as far down as its limit asks, or nearly.
    pub fn has_given(&self, vm: &VmSight) -> bool {
        self.excess.0 <= vm.memory_bytes / EXCESS_PART
    }

    /// Notes that something was decided.
    pub fn decided(&mut self, now: Duration) {
        self.decided = Some(now);
    }

    /// Whether something was decided in this look.
    pub fn is_decided(&self, now: Duration) -> bool {
        self.decided == Some(now)
    }

    /// Notes that the limit was lowered.
    pub fn lowered(&mut self, now: Duration) {
        self.lowered = Some(now);
    }

    /// Notes that it is probed. `owed`: what that takes from it for others.
    pub fn probed(&mut self, owed: u64, now: Duration) {
        self.probes = self.probes.saturating_add(1);
        self.owed = Some((owed, now));
    }

    /// What it gets back if it misses memory, whatever the host has: the last probe took it for
    /// others.
    pub fn owed_bytes(&self, now: Duration) -> u64 {
        self.owed.filter(|(_, at)| now < *at + BLAME).map_or(0, |(bytes, _)| bytes)
    }

    /// Probes since it missed memory, or since it was left alone for a while.
    pub fn probes(&self) -> u32 {
        self.probes
    }

    /// Notes that the size of its compressed memory was changed.
    pub fn compressed(&mut self, now: Duration) {
        self.compressed = Some(now);
    }

    /// Whether its compressed memory may grow.
    pub fn may_widen(&self, now: Duration) -> bool {
        self.compressed.is_none_or(|changed| now >= changed + COMPRESSED_REST)
    }

    /// Whether free memory is to be reclaimed again: `every` so often.
    pub fn is_reclaim_due(&self, now: Duration, every: Duration) -> bool {
        self.reclaimed.is_none_or(|(last, ..)| now >= last + every)
    }

    /// Notes that so much free memory is to be reclaimed. Returns how much of it counts as given:
    /// nothing, if the last time the VM took as much afterwards as before.
    pub fn reclaim(&mut self, vm: &VmSight, bytes: u64, now: Duration) -> u64 {
        let last = self.reclaimed.replace((now, bytes, vm.resident_bytes));
        let kept_its_word = last.is_none_or(|(_, bytes, resident)| {
            resident.saturating_sub(vm.resident_bytes) >= bytes / CREDIT_PART
        });
        if kept_its_word { bytes } else { 0 }
    }
}
