//! Memory that guests unplug and plug again, as a rung of the ladder.
//!
//! A guest is asked for no more than what it can spare by its own word, and it gets memory back
//! before it needs it: once it can spare nothing more.

use ebb_units::Bytes;

use super::decision::Action;
use super::ladder::{GIVE_PART, LOWEST_FIRST, Round, States, Vm};
use super::sight::{SizeSight, VmSight};
use crate::need::MemoryFigures;

/// A guest that can spare something is asked for this part of it.
const SPARE_PART: u64 = 2;

impl Round<'_> {
    /// Has guests unplug what they can spare, of the lowest class first, while the host lacks memory.
    /// What comes of it is not known before, so it counts once it has come.
    pub(super) fn unplug(&mut self, vms: &[VmSight], states: &mut States) {
        for class in LOWEST_FIRST {
            for vm in vms.iter().filter(|vm| vm.rule.class == class) {
                let state = states.get_mut(&vm.name).filter(|state| self.may_change(vm, state));
                let (Some(state), Some(size)) = (state, vm.size) else { continue };
                let Some(guest) = vm.guest.filter(|_| self.budget.lacks() > 0) else { continue };
                let spare = guest.spare_bytes() / SPARE_PART;
                let most = spare.min(vm.memory_bytes / self.stage.rate_part());
                let to = smaller(vm, size, most.max(size.block_bytes).min(spare));
                // One step after the other: the guest may be slow, or refuse.
                let has_given = size.bytes <= size.target_bytes;
                if to < size.target_bytes && has_given && state.may_unplug(self.now) {
                    let why = format!(
                        "its guest can spare {} of {}; the host is {}: {}",
                        Bytes(guest.spare_bytes()),
                        Bytes(guest.total_bytes),
                        self.stage,
                        self.host
                    );
                    self.resize((vm, state), size, to, why);
                }
            }
        }
    }

    /// Gives plugged memory back to a guest that can spare nothing more: all of it, if it is about
    /// to run out of memory. The rule may ask for more memory than it has, too.
    pub(super) fn plug_needed(&mut self, (vm, state): Vm<'_>) {
        let Some(size) = vm.size.filter(|size| size.target_bytes < size.full_bytes) else { return };
        let needs = |guest: &MemoryFigures| guest.spare_bytes() == 0;
        let wanted = vm.rule.min_bytes.unwrap_or(0);
        let least = size.above(wanted.max(size.target_bytes));
        let (to, why) = match (vm.pressed(), vm.guest.filter(needs)) {
            (Some(guest), _) => (size.full_bytes, Some(guest)),
            (None, Some(guest)) => (larger(vm, size).max(least), Some(guest)),
            (None, None) => (least, None),
        };
        if to > size.target_bytes && !state.is_decided(self.now) {
            let why = match why {
                Some(guest) => format!(
                    "its guest can spare nothing: {} of {} available",
                    Bytes(guest.available_bytes),
                    Bytes(guest.total_bytes)
                ),
                None => format!("it is to have {} at least", Bytes(wanted)),
            };
            state.plugged(self.now);
            self.resize((vm, state), size, to, why);
        }
    }

    /// Gives plugged memory back because the host has enough: `left` at most. Returns how much.
    pub(super) fn plug(&mut self, (vm, state): Vm<'_>, left: u64) -> u64 {
        let Some(size) = vm.size.filter(|size| size.target_bytes < size.full_bytes) else {
            return 0;
        };
        let to = larger(vm, size);
        let bytes = to.saturating_sub(size.target_bytes);
        if bytes == 0 || bytes > left {
            return 0;
        }
        let why = format!("the host is {}: {}", self.stage, self.host);
        state.plugged(self.now);
        self.resize((vm, state), size, to, why);
        bytes
    }

    fn resize(&mut self, (vm, state): Vm<'_>, size: SizeSight, to: u64, why: String) {
        state.decided(self.now);
        self.decide(vm, Action::Resize { from: size.target_bytes, to }, why);
    }
}

/// The size after so much was unplugged, no less than the VM's rule allows.
fn smaller(vm: &VmSight, size: SizeSight, bytes: u64) -> u64 {
    let least = size.above(vm.least_bytes().max(size.base_bytes));
    size.above(size.target_bytes.saturating_sub(bytes)).max(least)
}

/// The size after the next step up.
fn larger(vm: &VmSight, size: SizeSight) -> u64 {
    let step = (vm.memory_bytes / GIVE_PART).max(size.block_bytes);
    size.above(size.target_bytes.saturating_add(step)).min(size.full_bytes)
}
