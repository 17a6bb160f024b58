//! What the host lacks in a look, and what VMs may get.

use super::rule::{Class, HostRule};
use super::sight::VmSight;
use super::stage::Stage;
use crate::pressure::{Budget as Bound, HostMemory};

/// What is to be available beyond a stage's border, in sixteenths of it. The stage ends at two of
/// them, so that it ends although the last step is too small to be taken.
const GOAL_SIXTEENTHS: i128 = 3;
/// VMs get this part of what the host has too much in a second.
const SURPLUS_PART: i128 = 8;
/// Batch VMs that miss memory get this part of what is beyond the reserve in a second.
const BATCH_PART: i128 = 4;
/// What VMs get in a second at least, while the host has too much.
const GIVE_LEAST_BYTES: u64 = 16 << 20;

/// What VMs got that missed memory, in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct Given {
    all: i128,
    /// What batch VMs got of it as their part of what is beyond the reserve.
    batch: i128,
}

/// Bytes, as they are while a look decides.
pub(super) struct Budget {
    /// Available now, and what VMs are about to give.
    available: i128,
    reserve: i128,
    /// What stays with the host whatever VMs miss.
    kept: i128,
    /// Taken in this look.
    taken: i128,
    /// Given to VMs that missed memory, in this look and, between two seconds, since the last whole one.
    given: Given,
    /// What the ladder takes from batch VMs in a second, while the host's stage is critical.
    lent: i128,
    is_between: bool,
}

impl Budget {
    /// `coming_bytes`: what VMs are about to give. `is_full`: nothing in use is taken, so batch VMs
    /// lend nothing.
    pub fn new(
        rule: HostRule,
        (host, vms, is_full): (&HostMemory, &[VmSight], bool),
        coming_bytes: i128,
        stage: Stage,
    ) -> Budget {
        let reserve_of = |bound: &Bound| i128::from(rule.reserve.of(bound.total_bytes));
        let beyond = |bound: &Bound| i128::from(bound.available_bytes) - 2 * reserve_of(bound);
        let tightest = host.bounds().min_by_key(|bound| beyond(bound)).unwrap_or(&host.host);
        let gives = |vm: &&VmSight| vm.rule.class == Class::Batch && vm.may_give();
        let warm = |vm: &VmSight| vm.warm_bytes().min(vm.memory_bytes / stage.rate_part());
        let lent = match stage {
            Stage::Critical if !is_full => {
                vms.iter().filter(gives).map(|vm| i128::from(warm(vm))).sum()
            }
            _ => 0,
        };
        let reserve = reserve_of(tightest);
        let kept = match stage {
            // What was taken from those who miss it does not go back to them.
            Stage::Critical => with_margin(reserve / 2),
            _ => reserve / 2,
        };
        Budget {
            available: i128::from(tightest.available_bytes) + coming_bytes,
            reserve,
            kept,
            taken: 0,
            given: Given::default(),
            lent,
            is_between: false,
        }
    }

    /// Goes on with what was given since the last whole look. Nothing is taken in between, so batch
    /// VMs lend nothing, and they get what they have not had yet of their part of this second.
    pub fn go_on(&mut self, given: Given) {
        (self.given, self.lent, self.is_between) = (given, 0, true);
    }

    /// Whether this is a look between two seconds, in which nothing is taken, and by which nobody is
    /// judged.
    pub fn is_between(&self) -> bool {
        self.is_between
    }

    /// What was given to VMs that missed memory.
    pub fn given(&self) -> Given {
        self.given
    }

    fn below(&self, border: i128) -> u64 {
        unsigned(with_margin(border) - self.available - self.taken)
    }

    /// What is yet to be taken until there is twice the reserve.
    pub fn lacks(&self) -> u64 {
        self.below(2 * self.reserve)
    }

    /// What is yet to be taken until there is the reserve.
    pub fn lacks_warm(&self) -> u64 {
        self.below(self.reserve)
    }

    /// What is yet to be taken until the host's stage is not critical.
    pub fn lacks_last(&self) -> u64 {
        self.below(self.reserve / 2)
    }

    /// Notes that so much is taken.
    pub fn take(&mut self, bytes: u64) {
        self.taken += i128::from(bytes);
    }

    /// Notes that so much is given.
    pub fn give(&mut self, bytes: u64) {
        self.given.all += i128::from(bytes);
    }

    /// What VMs may get in this second because the host has too much.
    pub fn to_give(&self) -> u64 {
        let surplus = self.available - with_margin(2 * self.reserve) - self.given.all;
        match unsigned(surplus) {
            0 => 0,
            surplus => unsigned(i128::from(surplus) / SURPLUS_PART).max(GIVE_LEAST_BYTES),
        }
    }

    /// Returns how much a VM gets of what it misses. Half of the reserve stays. Batch VMs get a
    /// part of what is beyond the reserve, unless their guest waits for room. Others also get what
    /// batch VMs are about to lose. `owed`: what was taken from the VM just now, for others. Of that
    /// it gets back what leaves a quarter of the reserve: others lose it then.
    pub fn relieve(&mut self, vm: &VmSight, wanted: u64, owed: u64) -> u64 {
        let left = self.available - self.given.all;
        let has_part = vm.rule.class == Class::Batch && !vm.waits;
        let room = match vm.rule.class {
            Class::Batch if has_part => self.batch_room(left),
            Class::Batch => left - self.kept,
            Class::Normal | Class::Latency => left - self.kept + self.lent,
        };
        let owed = i128::from(owed).min(left - self.kept / 2);
        let bytes = wanted.min(unsigned(room.max(owed)));
        self.give(bytes);
        if has_part {
            self.given.batch += i128::from(bytes);
        }
        bytes
    }

    /// What a batch VM may get if so much is `left`. However often VMs are looked at between two
    /// seconds, batch VMs together get their part once.
    fn batch_room(&self, left: i128) -> i128 {
        let had = if self.is_between { self.given.batch } else { 0 };
        (left + had - self.reserve) / BATCH_PART - had
    }
}

fn with_margin(border: i128) -> i128 {
    border + border * GOAL_SIXTEENTHS / 16
}

fn unsigned(bytes: i128) -> u64 {
    u64::try_from(bytes.max(0)).unwrap_or(u64::MAX)
}
