//! The pilot: what to take from which VM of a host, and what to give back, by one look a second.
//!
//! ```text
//! host memory --> Stage --+
//!                         |    free   -> cold -> warm of batch VMs     (take: `ladder`)
//! VMs as seen -> state ---+--> relief of a VM that misses its memory   (`state`)
//!                         |    limits go up again                      (give: `ladder`)
//!                         +--> decisions, each with its reason
//! ```
//!
//! What is taken first costs the guest least. Relief comes first of all: a VM whose evicted memory
//! comes back within seconds has a limit that is too low, whatever the host's stage.

mod budget;
mod decision;
mod ladder;
mod rule;
mod sight;
mod stage;
mod state;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use self::ladder::Round;
use self::stage::StageWatch;
use self::state::VmState;
use crate::pressure::HostMemory;

pub use self::decision::{Action, Decision};
pub use self::rule::{Class, HostRule, VmRule, WEIGHT_DEFAULT};
pub use self::sight::VmSight;
pub use self::stage::Stage;

/// The pilot of one host. It remembers of each VM what it did last.
#[derive(Default)]
pub struct Pilot {
    stage: StageWatch,
    vms: BTreeMap<String, VmState>,
}

impl Pilot {
    /// Looks at the host and its VMs, and returns what is to be done. `now`: the time since any
    /// fixed moment; it must not go backwards.
    pub fn look(
        &mut self,
        now: Duration,
        rule: HostRule,
        host: &HostMemory,
        vms: &[VmSight],
    ) -> Vec<Decision> {
        let names: BTreeSet<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
        self.vms.retain(|name, _| names.contains(name.as_str()));
        let stage = self.stage.look(now, rule, host);
        let mut round = Round::new(now, rule, (host, vms), stage);
        for vm in vms {
            let state = self.vms.entry(vm.name.clone()).or_default();
            state.note(vm, now);
            round.relieve(vm, state);
        }
        match stage {
            Stage::Ample => round.give(vms, &mut self.vms),
            _ => round.take(vms, &mut self.vms),
        }
        round.decisions
    }

    /// The stage at the last look.
    pub fn stage(&self) -> Stage {
        self.stage.stage()
    }
}
