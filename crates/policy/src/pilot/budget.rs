//! What the host lacks in a look, and what VMs may get.

use super::rule::{Class, HostRule};
use super::sight::VmSight;
use crate::pressure::{Budget as Bound, HostMemory};

/// What is to be available beyond a stage's border, as a part of it, so that the stage ends.
const GOAL_PART: i128 = 8;
/// VMs get this part of what the host has too much in a second.
const SURPLUS_PART: i128 = 8;
/// Batch VMs that miss memory get this part of what is beyond the reserve in a second.
const BATCH_PART: i128 = 4;
/// What VMs get in a second at least, while the host has too much.
const GIVE_LEAST_BYTES: u64 = 16 << 20;

/// Bytes, as they are while a look decides.
pub(super) struct Budget {
    /// Available now, and what VMs are about to give: they are above their limits.
    available: i128,
    reserve: i128,
    /// Taken in this look.
    taken: i128,
    /// Given to VMs in this look that missed memory.
    given: i128,
    /// What batch VMs and normal VMs could give at most.
    batch_warm: i128,
    normal_warm: i128,
}

impl Budget {
    pub fn new(rule: HostRule, host: &HostMemory, vms: &[VmSight]) -> Budget {
        let reserve_of = |bound: &Bound| i128::from(rule.reserve.of(bound.total_bytes));
        let beyond = |bound: &Bound| i128::from(bound.available_bytes) - 2 * reserve_of(bound);
        let tightest = host.bounds().min_by_key(|bound| beyond(bound)).unwrap_or(&host.host);
        let coming = |vm: &VmSight| {
            vm.limit_bytes.map_or(0, |limit| vm.resident_bytes.saturating_sub(limit))
        };
        let coming: i128 = vms.iter().map(|vm| i128::from(coming(vm))).sum();
        let warm = |class| {
            let of_class = vms.iter().filter(|vm| vm.rule.class == class && vm.may_give());
            of_class.map(|vm| i128::from(vm.warm_bytes())).sum()
        };
        Budget {
            available: i128::from(tightest.available_bytes) + coming,
            reserve: reserve_of(tightest),
            taken: 0,
            given: 0,
            batch_warm: warm(Class::Batch),
            normal_warm: warm(Class::Normal),
        }
    }

    fn below(&self, border: i128) -> u64 {
        let goal = border + border / GOAL_PART;
        unsigned(goal - self.available - self.taken)
    }

    /// What is yet to be taken until there is twice the reserve.
    pub fn lacks(&self) -> u64 {
        self.below(2 * self.reserve)
    }

    /// What is yet to be taken until there is the reserve.
    pub fn lacks_warm(&self) -> u64 {
        self.below(self.reserve)
    }

    /// Notes that so much is taken.
    pub fn take(&mut self, bytes: u64) {
        self.taken += i128::from(bytes);
    }

    /// What VMs may get in this second because the host has too much.
    pub fn to_give(&self) -> u64 {
        let border = 2 * self.reserve;
        let surplus = self.available - border - border / GOAL_PART - self.given;
        match unsigned(surplus) {
            0 => 0,
            surplus => unsigned(i128::from(surplus) / SURPLUS_PART).max(GIVE_LEAST_BYTES),
        }
    }

    /// Returns how much a VM gets of what it misses. It may get what is beyond the reserve, of
    /// which batch VMs get a part only, and what VMs of lower classes could give. A guest that
    /// waits for room may get half of the reserve, too.
    pub fn relieve(&mut self, vm: &VmSight, wanted: u64) -> u64 {
        let room = self.available - self.reserve - self.given;
        let room = match vm.rule.class {
            Class::Batch => room.max(0) / BATCH_PART,
            Class::Normal => room + self.batch_warm,
            Class::Latency => room + self.batch_warm + self.normal_warm,
        };
        let room = if vm.waits { room + self.reserve / 2 } else { room };
        let bytes = wanted.min(unsigned(room));
        self.given += i128::from(bytes);
        bytes
    }
}

fn unsigned(bytes: i128) -> u64 {
    u64::try_from(bytes.max(0)).unwrap_or(u64::MAX)
}
