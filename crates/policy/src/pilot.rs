//! The pilot: what to take from which VM of a host, and what to give back, by one look a second. VMs
//! that miss memory are relieved in between, too.
//!
//! ```text
//! host memory --> Stage --+
//!                         |    free -> cold -> compressed -> warm      (take: `ladder`)
//!                         |    what nothing else takes is unplugged    (take: `plugged`)
//! VMs as seen -> state ---+--> relief of a VM that misses its memory   (`state`)
//!                         |    limits go up again                      (give: `ladder`)
//!                         |    what was unplugged is plugged again     (give: `plugged`)
//!                         +--> decisions, each with its reason
//! ```
//!
//! What is taken first costs the guest least. Relief comes first of all: a VM whose evicted memory
//! comes back within seconds has a limit that is too low, whatever the host's stage.

mod budget;
mod decision;
mod ladder;
mod plug_state;
mod plugged;
mod probe;
mod rule;
mod sight;
mod stage;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use self::budget::{Budget, Given};
use self::ladder::Round;
use self::stage::StageWatch;
use self::state::VmState;

pub use self::decision::{Action, Decision};
pub use self::rule::{COMPRESSED_PART, Class, HostRule, VmRule, WEIGHT_DEFAULT};
pub use self::sight::{CompressedSight, HostSight, PluggedSight, VmSight};
pub use self::stage::Stage;

/// The pilot of one host. It remembers of each VM what it did last.
#[derive(Default)]
pub struct Pilot {
    stage: StageWatch,
    /// Whether the swap files are full.
    is_full: bool,
    /// Given to VMs that missed memory since the last whole look.
    given: Given,
    vms: BTreeMap<String, VmState>,
}

impl Pilot {
    /// Looks at the host and its VMs, and returns what is to be done. Call it once a second. `now`:
    /// the time since any fixed moment; it must not go backwards.
    pub fn look<'a>(
        &mut self,
        now: Duration,
        rule: HostRule,
        host: impl Into<HostSight<'a>>,
        vms: &[VmSight],
    ) -> Vec<Decision> {
        let mut round = self.begin(now, rule, host.into(), vms);
        round.plug_needed(vms, &mut self.vms);
        round.bound_all(vms, &mut self.vms);
        round.relieve_all(vms, &mut self.vms);
        self.given = round.given();
        round.reclaim(vms, &mut self.vms);
        match self.stage.stage() {
            Stage::Ample => {
                round.plug_again(vms, &mut self.vms);
                round.give(vms, &mut self.vms);
            }
            _ => {
                round.unplug_unseen(vms, &mut self.vms);
                round.take(vms, &mut self.vms);
                round.unplug_last(vms, &mut self.vms);
            }
        }
        round.decisions
    }

    /// Looks between two seconds, because a VM misses memory: such VMs are relieved, guests get
    /// back what they may need of what they have unplugged, and nothing else is done. It takes what
    /// [`Pilot::look`] takes.
    pub fn relieve<'a>(
        &mut self,
        now: Duration,
        rule: HostRule,
        host: impl Into<HostSight<'a>>,
        vms: &[VmSight],
    ) -> Vec<Decision> {
        let mut round = self.begin(now, rule, host.into(), vms);
        round.go_on(self.given);
        round.plug_needed(vms, &mut self.vms);
        round.relieve_all(vms, &mut self.vms);
        self.given = round.given();
        round.decisions
    }

    /// Notes what is seen.
    fn begin<'a>(
        &mut self,
        now: Duration,
        rule: HostRule,
        host: HostSight<'a>,
        vms: &[VmSight],
    ) -> Round<'a> {
        self.is_full = host.is_full(rule, self.is_full);
        let host = host.memory;
        // A VM that is slow to publish figures is still the same one.
        self.vms.retain(|_, state| !state.is_old(now));
        let stage = self.stage.look(now, rule, host);
        let coming_bytes = vms.iter().map(|vm| {
            let state = self.vms.entry(vm.name.clone()).or_default();
            state.note(vm, now);
            i128::from(state.coming_bytes(now))
        });
        let coming_bytes = coming_bytes.sum();
        let budget = Budget::new(rule, (host, vms, self.is_full), coming_bytes, stage);
        Round::new(now, (host, self.is_full), stage, budget)
    }

    /// The stage at the last look.
    pub fn stage(&self) -> Stage {
        self.stage.stage()
    }
}
