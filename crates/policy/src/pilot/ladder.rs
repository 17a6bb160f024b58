//! One look: what is taken from VMs, rung by rung, and what they get.
//!
//! | rung | what is taken | from whom |
//! |---|---|---|
//! | free | free memory of guests | all |
//! | unseen | what guests can unplug | those of which Ebb does not see what is free |
//! | cold | what a VM does not work with | batch VMs first, then normal, then latency |
//! | disk | compressed pages, which go to the swap file | as cold, while the host is short |
//! | warm | what a VM works with | batch VMs, while the host's stage is critical |
//! | rested | as a probe | latency VMs that miss nothing, while another VM misses more than it gets |
//! | last | what a VM works with | normal VMs, then latency, while the host's stage is critical |
//! | probe | a little of what it seems to work with, while nobody has cold memory | as cold |
//! | last of all | what guests can unplug | those that no limit reaches, while the host is short |
//!
//! What a VM works with is known only roughly. A probe finds out: if the VM misses the memory, it
//! is relieved, and its limit rests longer each time. In the critical stage, latency VMs that miss
//! nothing are probed before anybody loses what it misses, else after all others are probed.
//!
//! Within a VM, its eviction takes first what costs least: pages that a disk holds, then clean
//! ones, then those that must be compressed or written. While the host is tight, VMs that give get
//! compressed memory, which is a part of what they take.

use std::collections::BTreeMap;
use std::time::Duration;

use ebb_units::Bytes;

use super::budget::{Budget, Given};
use super::decision::{Action, Decision};
use super::rule::{COMPRESSED_PART, Class, WEIGHT_DEFAULT};
use super::sight::VmSight;
use super::stage::Stage;
use super::state::VmState;
use crate::pressure::HostMemory;

/// Least free memory for which a round is worth while.
pub(super) const SPARE_LEAST_BYTES: u64 = 16 << 20;
/// A limit is changed by this part of a VM's memory at least.
pub(super) const STEP_PART: u64 = 256;
/// A limit goes up by this part of a VM's memory in a second, as far as the host has it.
pub(super) const GIVE_PART: u64 = 32;

pub(super) type States = BTreeMap<String, VmState>;
pub(super) type Vm<'v> = (&'v VmSight, &'v mut VmState);

/// What a look has decided so far.
pub(super) struct Round<'a> {
    pub(super) now: Duration,
    pub(super) host: &'a HostMemory,
    /// Whether the swap files are full, so that nothing in use is taken.
    pub(super) is_full: bool,
    pub(super) stage: Stage,
    pub(super) budget: Budget,
    /// Whether a limit was lowered in this look by more than a probe.
    pub(super) has_lowered: bool,
    /// The highest class of the VMs that miss more memory than they get in this look.
    pub(super) wanting: Option<Class>,
    pub decisions: Vec<Decision>,
}

/// A part of a VM's memory that is taken together.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rung {
    Cold,
    /// What is compressed goes to the swap file.
    Disk,
    Warm,
    /// What VMs work with that are no batch VMs: the host needs it to live.
    Last,
    /// A probe of a VM that has missed nothing for a while, for others that miss memory.
    Rested,
    Probe,
    /// A probe of a VM of which nothing is known yet.
    FirstProbe,
}

/// The VMs of a class, those first that have least for their weight: they are given memory first, so
/// that the VMs of a class share what there is by their weights.
pub(super) fn poorest_first(vms: &[VmSight], class: Class) -> Vec<&VmSight> {
    let mut of_class: Vec<&VmSight> = vms.iter().filter(|vm| vm.rule.class == class).collect();
    let part =
        |vm: &VmSight| (u128::from(vm.has_bytes()) << 32) / u128::from(vm.rule.weight.max(1));
    of_class.sort_by_key(|vm| part(vm));
    of_class
}

pub(super) const LOWEST_FIRST: [Class; 3] = [Class::Batch, Class::Normal, Class::Latency];
pub(super) const HIGHEST_FIRST: [Class; 3] = [Class::Latency, Class::Normal, Class::Batch];

impl<'a> Round<'a> {
    pub fn new(
        now: Duration,
        (host, is_full): (&'a HostMemory, bool),
        stage: Stage,
        budget: Budget,
    ) -> Round<'a> {
        let (has_lowered, wanting, decisions) = (false, None, Vec::new());
        Round { now, host, is_full, stage, budget, has_lowered, wanting, decisions }
    }

    /// Makes this a look between two seconds. `given`: what was given since the last whole look.
    pub fn go_on(&mut self, given: Given) {
        self.budget.go_on(given);
    }

    /// What was given to VMs that missed memory since the last whole look.
    pub fn given(&self) -> Given {
        self.budget.given()
    }

    /// Bounds VMs that have more than they may.
    pub fn bound_all(&mut self, vms: &[VmSight], states: &mut States) {
        if self.is_full {
            return;
        }
        for vm in vms.iter().filter(|vm| vm.may_give()) {
            let most = vm.most_bytes();
            let is_above = vm.limit_bytes.is_none_or(|limit| limit > most);
            let state = states.get_mut(&vm.name).filter(|state| !state.is_decided(self.now));
            let state = state.filter(|_| most < vm.memory_bytes && is_above);
            let Some(state) = state else { continue };
            let step = vm.memory_bytes / Stage::Short.rate_part();
            let to = most.max(vm.has_bytes().saturating_sub(step));
            self.limit((vm, state), Some(to), format!("it may have {} at most", Bytes(most)));
        }
    }

    /// Raises the limits of VMs that miss memory.
    pub fn relieve_all(&mut self, vms: &[VmSight], states: &mut States) {
        for class in HIGHEST_FIRST {
            for vm in poorest_first(vms, class).into_iter().filter(|vm| vm.may_give()) {
                if let Some(state) = states.get_mut(&vm.name) {
                    self.relieve((vm, state));
                }
            }
        }
    }

    fn relieve(&mut self, (vm, state): Vm<'_>) {
        if !self.budget.is_between() {
            state.judged();
        }
        let is_short = state.misses_memory(vm) || state.may_ease(vm, self.now);
        let is_short = is_short && !state.is_decided(self.now);
        let Some(limit) = vm.limit_bytes.filter(|_| is_short) else { return };
        let wanted = state.relief_bytes(vm).min(vm.most_bytes().saturating_sub(limit));
        let bytes = self.budget.relieve(vm, wanted, state.owed_bytes(self.now));
        if bytes < wanted {
            self.wanting = self.wanting.max(Some(vm.rule.class));
        }
        if bytes < vm.memory_bytes / STEP_PART {
            return;
        }
        let why = match (state.missed_bytes(), vm.pressed()) {
            (0, _) => "its guest waits for room".to_owned(),
            (bytes, Some(guest)) if !state.misses_memory(vm) => format!(
                "its guest is short of memory, with {} of {} available, and {} came back within \
                 seconds",
                Bytes(guest.available_bytes),
                Bytes(guest.total_bytes),
                Bytes(bytes)
            ),
            (bytes, _) => format!("{} of evicted memory came back within seconds", Bytes(bytes)),
        };
        state.relieved(self.now);
        self.raise((vm, state), limit.saturating_add(bytes), why);
    }

    /// Takes from VMs what the host lacks beside free memory.
    pub fn take(&mut self, vms: &[VmSight], states: &mut States) {
        if self.is_full {
            return;
        }
        if self.stage == Stage::Tight {
            self.widen(vms, states);
        }
        LOWEST_FIRST.into_iter().for_each(|class| self.lower(vms, states, (Rung::Cold, class)));
        if self.stage >= Stage::Short {
            LOWEST_FIRST.into_iter().for_each(|class| self.lower(vms, states, (Rung::Disk, class)));
        }
        if self.stage == Stage::Critical {
            self.lower(vms, states, (Rung::Warm, Class::Batch));
            self.lower_rested(vms, states);
            // Nobody keeps the host from what it needs to live: by class and weight all have less.
            self.lower(vms, states, (Rung::Last, Class::Normal));
            self.lower(vms, states, (Rung::Last, Class::Latency));
        }
        self.probe(vms, states);
    }

    /// Gives VMs what the host has too much.
    pub fn give(&mut self, vms: &[VmSight], states: &mut States) {
        let mut left = self.budget.to_give();
        for class in HIGHEST_FIRST {
            for vm in poorest_first(vms, class) {
                let state = states.get_mut(&vm.name).filter(|state| self.may_change(vm, state));
                let (Some(limit), Some(state)) = (vm.limit_bytes, state) else { continue };
                let bytes = (vm.memory_bytes / GIVE_PART).min(left);
                if limit < vm.most_bytes() && bytes >= vm.memory_bytes / STEP_PART {
                    left -= bytes;
                    let why = format!("the host is {}: {}", self.stage, self.host);
                    self.raise((vm, state), limit.saturating_add(bytes), why);
                }
            }
        }
        self.give_compressed(vms, states);
    }

    /// Gives VMs that have all that they may have the compressed memory back that somebody else had
    /// given them: it takes nothing of the host before their limit is lowered again.
    fn give_compressed(&mut self, vms: &[VmSight], states: &mut States) {
        // It has all that it may have.
        let is_whole = |vm: &&VmSight| vm.limit_bytes.is_none_or(|limit| limit >= vm.most_bytes());
        for vm in vms.iter().filter(is_whole).filter(|vm| vm.lacks_compressed().is_some()) {
            let state = states.get_mut(&vm.name).filter(|state| self.may_change(vm, state));
            if let Some(state) = state {
                let why = format!("the host is {}: {}", self.stage, self.host);
                self.compress((vm, state), None, why);
            }
        }
    }

    /// Reclaims free memory. While the host has enough, only what is beyond what guests keep.
    pub fn reclaim(&mut self, vms: &[VmSight], states: &mut States) {
        for vm in vms.iter().filter(|vm| vm.may_reclaim && !vm.rule.is_held) {
            let kept = match (self.stage, vm.rule.class.kept_part()) {
                (Stage::Ample, Some(part)) => vm.memory_bytes / part,
                _ => 0,
            };
            let bytes = vm.spare_bytes.saturating_sub(kept);
            let Some(state) = states.get_mut(&vm.name) else { continue };
            let is_due = state.is_reclaim_due(self.now, self.stage.reclaim_every());
            if bytes >= SPARE_LEAST_BYTES && is_due && !state.is_decided(self.now) {
                self.budget.take(state.reclaim(vm, bytes, self.now));
                state.decided(self.now);
                let (spare, kept) = (Bytes(vm.spare_bytes), Bytes(kept));
                let why = format!("{spare} free, keeps {kept}; {}", self.host);
                self.decide(vm, Action::Reclaim { bytes }, why);
            }
        }
    }

    /// Gives VMs compressed memory before they lose memory in use: what comes back from there comes
    /// back sooner.
    fn widen(&mut self, vms: &[VmSight], states: &mut States) {
        if self.budget.lacks() == 0 {
            return;
        }
        for vm in vms.iter().filter(|vm| vm.warm_bytes() >= vm.memory_bytes / STEP_PART) {
            let state = states.get_mut(&vm.name).filter(|state| self.may_change(vm, state));
            let (Some(state), Some(compressed)) = (state, vm.compressed) else { continue };
            let to = vm.memory_bytes / COMPRESSED_PART;
            if compressed.most_bytes < to && state.may_widen(self.now) {
                let why = format!(
                    "cold memory is compressed before it goes to the swap file; the host is {}: {}",
                    self.stage, self.host
                );
                self.compress((vm, state), Some(to), why);
            }
        }
    }

    /// Lowers limits of VMs of a class by a part of what they have on the rung, until the host
    /// lacks nothing more. VMs of less weight give more.
    pub(super) fn lower(
        &mut self,
        vms: &[VmSight],
        states: &mut States,
        (rung, class): (Rung, Class),
    ) {
        let gives = |vm: &VmSight| {
            let state = states.get(&vm.name).filter(|state| self.may_lower(vm, state, rung))?;
            Some(self.gives(vm, state, rung)).filter(|bytes| *bytes >= vm.memory_bytes / STEP_PART)
        };
        let of_class = vms.iter().filter(|vm| vm.rule.class == class);
        let giving: Vec<(&VmSight, u64)> =
            of_class.filter_map(|vm| Some((vm, gives(vm)?))).collect();
        let part = |(vm, bytes): &(&VmSight, u64)| {
            let bytes = u128::from(*bytes) * u128::from(WEIGHT_DEFAULT);
            bytes / u128::from(vm.rule.weight.max(1))
        };
        let all: u128 = giving.iter().map(part).sum();
        let wanted = u128::from(match rung {
            Rung::Disk | Rung::Warm => self.budget.lacks_warm(),
            Rung::Last => self.budget.lacks_last(),
            _ => self.budget.lacks(),
        });
        for (vm, most) in giving {
            let share = wanted.saturating_mul(part(&(vm, most))).checked_div(all).unwrap_or(0);
            let bytes = u64::try_from(share).unwrap_or(u64::MAX).min(most);
            let Some(state) = states.get_mut(&vm.name) else { continue };
            if bytes < vm.memory_bytes / STEP_PART {
                continue;
            }
            self.budget.take(bytes);
            let is_probe = matches!(rung, Rung::Rested | Rung::Probe | Rung::FirstProbe);
            self.has_lowered |= !is_probe;
            let why = self.why_lowered((vm, state), rung);
            if rung == Rung::Disk {
                let to = vm.compressed_bytes().saturating_sub(bytes);
                self.compress((vm, state), Some(to), why);
                continue;
            }
            state.lowered(self.now);
            if is_probe {
                let is_for_others = rung == Rung::Rested;
                state.probed(if is_for_others { bytes } else { 0 }, self.now);
            }
            let to = vm.has_bytes().saturating_sub(bytes).max(vm.least_bytes());
            self.limit((vm, state), Some(to), why);
        }
    }

    /// What a VM gives on this rung in a second.
    fn gives(&self, vm: &VmSight, state: &VmState, rung: Rung) -> u64 {
        let (bytes, part) = match (rung, state.working_bytes()) {
            (Rung::Cold, Some(working)) => (vm.cold_bytes(working), self.cold_part()),
            (Rung::Warm | Rung::Last, _) => (u64::MAX, self.stage.rate_part()),
            (Rung::Rested | Rung::Probe, _) | (Rung::FirstProbe, None) => {
                (u64::MAX, self.probe_part(vm, state))
            }
            (Rung::Cold, None) | (Rung::FirstProbe, Some(_)) => (0, 1),
            (Rung::Disk, _) => (vm.compressed_bytes(), self.stage.rate_part()),
        };
        bytes.min(vm.warm_bytes()).min(vm.memory_bytes / part)
    }

    /// The most cold memory that a VM gives in a second: this part of its memory. It goes faster
    /// while somebody misses memory that the host does not have.
    fn cold_part(&self) -> u64 {
        let part = self.stage.rate_part();
        if self.wanting.is_some() { part.min(Stage::Short.rate_part()) } else { part }
    }

    fn why_lowered(&self, (vm, state): (&VmSight, &VmState), rung: Rung) -> String {
        let has = Bytes(vm.resident_bytes);
        let works = match state.working_bytes() {
            Some(bytes) => format!("works with {}", Bytes(bytes)),
            None => "what it works with is not known yet".to_owned(),
        };
        let which = match rung {
            Rung::Disk => {
                let compressed = Bytes(vm.compressed_bytes());
                return format!(
                    "{compressed} are compressed, and go to the swap file; the host is {}: {}",
                    self.stage, self.host
                );
            }
            Rung::Cold => "cold memory",
            Rung::Warm => "memory of a batch VM",
            Rung::Last => "its part of what the host needs to live",
            Rung::Rested => "what it uses least, since another VM misses memory",
            Rung::Probe | Rung::FirstProbe => "what it uses least",
        };
        format!("{which}: has {has}, {works}; the host is {}: {}", self.stage, self.host)
    }

    /// Whether its limit may be changed, and nothing was decided for it in this look.
    fn may_change(&self, vm: &VmSight, state: &VmState) -> bool {
        vm.may_give() && !state.is_decided(self.now)
    }

    /// Whether its limit may be lowered now. A batch VM that misses memory has no rest while the
    /// host's stage is critical.
    fn may_lower(&self, vm: &VmSight, state: &VmState, rung: Rung) -> bool {
        let may_lower = match rung {
            Rung::Warm => state.has_given(vm),
            // It may miss memory.
            Rung::Last => state.has_given(vm) && !state.rests(self.now, true),
            Rung::Rested if !state.is_quiet(self.now) => false,
            _ => state.may_lower(vm, self.now, self.stage == Stage::Critical),
        };
        may_lower && self.may_change(vm, state)
    }

    fn raise(&mut self, vm: Vm<'_>, to: u64, why: String) {
        let to = to.max(vm.0.least_bytes()).min(vm.0.most_bytes());
        let limit = (to < vm.0.memory_bytes).then_some(to);
        self.limit(vm, limit, why);
    }

    fn limit(&mut self, (vm, state): Vm<'_>, to: Option<u64>, why: String) {
        if to != vm.limit_bytes {
            state.decided(self.now);
            self.decide(vm, Action::Limit { from: vm.limit_bytes, to }, why);
        }
    }

    fn compress(&mut self, (vm, state): Vm<'_>, to: Option<u64>, why: String) {
        state.compressed(self.now);
        state.decided(self.now);
        let from = vm.compressed.map_or(0, |compressed| compressed.most_bytes);
        self.decide(vm, Action::Compress { from, to }, why);
    }

    pub(super) fn decide(&mut self, vm: &VmSight, action: Action, why: String) {
        self.decisions.push(Decision { vm: vm.name.clone(), action, why });
    }
}
