//! Probes: a little of what a VM seems to work with is taken, to find out if the VM misses it.
//!
//! What a VM works with stands still while nothing is evicted from it. So a VM that has needed much
//! seems to need it for ever. Probes are small, as nobody knows what they find. While somebody
//! misses more memory than it gets, they grow until the probed VM misses something.

use super::ladder::{Round, Rung, States};
use super::rule::Class;
use super::sight::VmSight;
use super::stage::Stage;
use super::state::VmState;

/// A probe takes this part of a VM's memory in a second.
const PROBE_PART: u64 = 100;
/// Probes that grow take this part of it at most.
const PROBE_MOST_PART: u64 = 25;

/// Whether a VM that matters less than a latency VM has more than it needs to live.
fn is_lower_and_warm(vm: &VmSight) -> bool {
    vm.rule.class < Class::Latency
        && vm.may_give()
        && vm.warm_bytes() > vm.memory_bytes / PROBE_PART
}

impl Round<'_> {
    /// Takes a little of what VMs seem to work with.
    pub fn probe(&mut self, vms: &[VmSight], states: &mut States) {
        // While there is memory that is known to be cold, only VMs of which nothing is known give.
        let rung = if self.has_lowered { Rung::FirstProbe } else { Rung::Probe };
        let of_latency = self.latency_probe(vms, states, rung);
        self.lower(vms, states, (rung, Class::Batch));
        self.lower(vms, states, (rung, Class::Normal));
        self.lower_rested(vms, states);
        if let Some(rung) = of_latency {
            self.lower(vms, states, (rung, Class::Latency));
        }
    }

    /// How latency VMs are probed, while others are probed by this rung. `None`: not at all, since
    /// others may give all that the host lacks.
    fn latency_probe(&self, vms: &[VmSight], states: &States, rung: Rung) -> Option<Rung> {
        let lower = || vms.iter().filter(|vm| is_lower_and_warm(vm));
        if lower().next().is_none() {
            return Some(rung);
        }
        let is_critical = self.stage == Stage::Critical;
        let may_give = |vm: &&VmSight| {
            let state = states.get(&vm.name);
            state.is_some_and(|state| state.may_lower(vm, self.now, is_critical))
        };
        let others = lower().filter(may_give).map(VmSight::warm_bytes);
        let others = others.fold(0, u64::saturating_add);
        (others < self.budget.lacks()).then_some(Rung::FirstProbe)
    }

    /// Probes latency VMs that have missed nothing for a while, if another VM misses more than it
    /// gets. What they seem to work with is old: it stands still while they give nothing.
    pub fn lower_rested(&mut self, vms: &[VmSight], states: &mut States) {
        if self.is_wanted_of(Class::Latency) {
            self.lower(vms, states, (Rung::Rested, Class::Latency));
        }
    }

    /// Whether VMs of a class give more because somebody misses more than it gets. Latency VMs do
    /// not do so for a batch VM.
    fn is_wanted_of(&self, class: Class) -> bool {
        match class {
            Class::Batch | Class::Normal => self.wanting.is_some(),
            Class::Latency => self.wanting >= Some(Class::Normal),
        }
    }

    /// The most that a probe takes: this part of a VM's memory. While somebody misses more than it
    /// gets, each probe takes twice as much as the last one, until the VM misses something.
    pub fn probe_part(&self, vm: &VmSight, state: &VmState) -> u64 {
        if !self.is_wanted_of(vm.rule.class) {
            return PROBE_PART;
        }
        PROBE_PART.checked_shr(state.probes()).unwrap_or(0).max(PROBE_MOST_PART)
    }
}
