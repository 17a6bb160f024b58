//! Memory that guests unplug, and plug again.
//!
//! It is for what nothing else takes without harm: free memory of guests of which Ebb does not see
//! what is free, and memory of VMs that no limit reaches. A guest is asked for no more than it can
//! spare by its own word, and for no more than the host lacks. It gets memory back before it needs
//! it, whatever the host has: what is plugged takes nothing of the host before the guest uses it.

use std::time::Duration;

use ebb_units::Bytes;

use super::decision::Action;
use super::ladder::{
    GIVE_PART, HIGHEST_FIRST, LOWEST_FIRST, Round, SPARE_LEAST_BYTES, STEP_PART, States, Vm,
    poorest_first,
};
use super::sight::{PluggedSight, VmSight};
use super::stage::Stage;
use super::state::VmState;

/// A guest unplugs this part of what it can spare at a time: what it can spare shrinks by more than
/// that.
const SPARE_PART: u64 = 2;
/// A guest that can spare nothing gets back this part of its memory at a time: its reserve.
const NEED_PART: u64 = 16;

impl Round<'_> {
    /// Has guests unplug what they can spare of which Ebb does not see what is free. A limit would
    /// have that compressed or written. In the critical stage what is faster goes first.
    pub fn unplug_unseen(&mut self, vms: &[VmSight], states: &mut States) {
        if self.stage == Stage::Critical {
            return;
        }
        for vm in vms.iter().filter(|vm| !vm.may_reclaim) {
            let state = states.get_mut(&vm.name);
            // Nothing else is asked of it meanwhile.
            if let Some(state) = state.filter(|state| state.plug.coming_bytes(self.now) > 0) {
                state.decided(self.now);
            }
        }
        self.unplug(vms, states, false);
    }

    /// Has guests unplug what they can spare that no limit reaches, until there is the reserve.
    pub fn unplug_last(&mut self, vms: &[VmSight], states: &mut States) {
        if self.stage >= Stage::Short {
            self.unplug(vms, states, true);
        }
    }

    /// Lower classes go first, and of a class those that have most for their weight.
    fn unplug(&mut self, vms: &[VmSight], states: &mut States, is_last: bool) {
        let is_full = self.is_full;
        let is_meant = |vm: &&VmSight| match is_last {
            true => is_full || !vm.may_limit,
            false => !vm.may_reclaim,
        };
        for class in LOWEST_FIRST {
            for vm in poorest_first(vms, class).into_iter().rev().filter(is_meant) {
                let Some(state) = states.get_mut(&vm.name) else { continue };
                let lacks = match is_last {
                    true => self.budget.lacks_warm(),
                    false => self.budget.lacks(),
                };
                let Some((from, bytes)) = self.unplugs((vm, state), lacks) else { continue };
                let why = format!(
                    "its guest can spare {}; the host is {}: {}",
                    Bytes(vm.guest.map_or(0, |guest| guest.spare_bytes())),
                    self.stage,
                    self.host
                );
                self.budget.take(bytes);
                state.plug.unplugs(vm, bytes, self.now);
                self.plug((vm, state), (from, from - bytes), why);
            }
        }
    }

    /// What is to be plugged of a VM, and how much of that its guest is to unplug, while the host
    /// lacks so much. `None`: nothing.
    fn unplugs(&self, (vm, state): (&VmSight, &VmState), lacks: u64) -> Option<(u64, u64)> {
        let has_free = vm.may_reclaim && vm.spare_bytes >= SPARE_LEAST_BYTES;
        let is_left_alone = vm.rule.is_held || vm.waits || state.is_decided(self.now);
        let is_relieved = state.misses_memory(vm) || state.rests(self.now, false);
        if has_free || is_left_alone || is_relieved {
            return None;
        }
        let is_settled = |it: &PluggedSight| it.bytes == it.asked_bytes;
        let plugged = vm.plugged.filter(|it| it.may_unplug && is_settled(it))?;
        if !state.plug.may_unplug(self.now) {
            return None;
        }
        let most = self.spare_bytes(vm).min(lacks).min(plugged.asked_bytes);
        let bytes = plugged.whole(most);
        let is_worth_it = bytes > 0 && bytes >= vm.memory_bytes / STEP_PART;
        is_worth_it.then_some((plugged.asked_bytes, bytes))
    }

    /// What a guest can spare at a time. What is not resident goes first and brings nothing, so it
    /// is not counted.
    fn spare_bytes(&self, vm: &VmSight) -> u64 {
        let holes = vm.memory_bytes.saturating_sub(vm.resident_bytes);
        let spare = vm.guest.map_or(0, |guest| guest.spare_bytes()).saturating_sub(holes);
        // The guest moves memory for it. So it goes no faster in the critical stage.
        let part = self.stage.rate_part().max(Stage::Short.rate_part());
        (spare / SPARE_PART).min(vm.warm_bytes()).min(vm.memory_bytes / part)
    }

    /// Gives memory back to guests that may need it, whatever the host has.
    pub fn plug_needed(&mut self, vms: &[VmSight], states: &mut States) {
        for vm in vms {
            let state = states.get_mut(&vm.name);
            let (Some(plugged), Some(state)) = (vm.unplugged(), state) else { continue };
            if state.is_decided(self.now) {
                continue;
            }
            if let Some((to, why)) = needs(vm, &plugged, state, self.now) {
                self.plug((vm, state), (plugged.asked_bytes, to), why);
            }
        }
    }

    /// Gives memory back because the host has enough.
    pub fn plug_again(&mut self, vms: &[VmSight], states: &mut States) {
        let (mut left, host) = (self.budget.to_give(), format!("{}: {}", self.stage, self.host));
        for class in HIGHEST_FIRST {
            for vm in poorest_first(vms, class) {
                let state = states.get_mut(&vm.name);
                let (Some(plugged), Some(state)) = (vm.unplugged(), state) else { continue };
                if left == 0 || plugged.is_coming() || state.is_decided(self.now) {
                    continue;
                }
                let to = more(&plugged, (vm.memory_bytes / GIVE_PART).min(left));
                let bytes = to.saturating_sub(plugged.asked_bytes);
                left = left.saturating_sub(bytes);
                self.budget.give(bytes);
                self.plug((vm, state), (plugged.asked_bytes, to), format!("the host is {host}"));
            }
        }
    }

    fn plug(&mut self, (vm, state): Vm<'_>, (from, to): (u64, u64), why: String) {
        state.decided(self.now);
        self.decide(vm, Action::Plug { from, to }, why);
    }
}

/// What is to be plugged after so much more, and one block at least.
fn more(plugged: &PluggedSight, bytes: u64) -> u64 {
    let step = plugged.whole(bytes.max(plugged.block_bytes)).max(1);
    plugged.asked_bytes.saturating_add(step).min(plugged.full_bytes)
}

/// What a guest is to have plugged because it may need that, and why.
fn needs(
    vm: &VmSight,
    plugged: &PluggedSight,
    state: &VmState,
    now: Duration,
) -> Option<(u64, String)> {
    let all = plugged.full_bytes;
    if vm.rule.is_held {
        return Some((all, "it is held: what it unplugged comes back first".into()));
    }
    if state.plug.is_silent(now) {
        return Some((all, "its guest does not say any more what it needs".into()));
    }
    let some = || more(plugged, vm.memory_bytes / NEED_PART);
    let wanted = vm.rule.min_bytes.unwrap_or(0);
    match vm.guest.filter(|guest| guest.spare_bytes() == 0) {
        // The next part follows once this one is there.
        Some(guest) if !guest.is_pressed() && plugged.is_coming() => None,
        Some(guest) => {
            let why = format!(
                "its guest can spare nothing: {} of {} available",
                Bytes(guest.available_bytes),
                Bytes(guest.total_bytes)
            );
            Some((if guest.is_pressed() { all } else { some() }, why))
        }
        None if vm.memory_bytes < wanted && !plugged.is_coming() => {
            Some((some(), format!("it is to have {} at least", Bytes(wanted))))
        }
        None => None,
    }
}
