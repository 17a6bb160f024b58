//! Several moments as one.

use std::collections::BTreeMap;

use ebb_api::{FaultSpread, Top, TopHost, TopVm, VmName};
use ebb_pager::GROUPS;

use crate::model::fault_spread::spread;

/// Returns these moments, the latest last, as one. `None`: there are none.
pub fn merge(all: impl IntoIterator<Item = Top>) -> Option<Top> {
    let mut merging = Merging::default();
    all.into_iter().for_each(|top| merging.add(top));
    merging.end()
}

/// Moments that become one: rates are means, times of faults are those of all faults, whoever
/// waited or missed memory at any time did so, and all else is as it was last. It takes the room of
/// one moment, however many there are.
#[derive(Default)]
pub struct Merging {
    /// When the last one was, and the host then.
    last: Option<(u64, TopHost)>,
    stall_permille: Mean,
    vms: BTreeMap<VmName, MergingVm>,
}

struct MergingVm {
    last: TopVm,
    faults_per_s: Mean,
    fault_counts: FaultSums,
    refaulted_bytes_per_s: Mean,
}

/// How many faults took how long. Counts can be added, and quantiles cannot. None: not known.
#[derive(Default)]
struct FaultSums(Option<[u64; GROUPS]>);

#[derive(Default)]
struct Mean {
    sum: u128,
    count: u128,
}

impl Merging {
    /// Adds a moment, later than those before.
    pub fn add(&mut self, top: Top) {
        let Top { at_unix_ms, host, vms } = top;
        self.stall_permille.add(host.stall_permille.map(u64::from));
        self.last = Some((at_unix_ms, host));
        for vm in vms {
            match self.vms.get_mut(&vm.name) {
                Some(merging) => merging.add(vm),
                None => drop(self.vms.insert(vm.name.clone(), MergingVm::new(vm))),
            }
        }
    }

    /// How many VMs there were.
    pub fn vms(&self) -> usize {
        self.vms.len()
    }

    /// Returns the moment that they are. `None`: there are none.
    pub fn end(self) -> Option<Top> {
        let (at_unix_ms, mut host) = self.last?;
        host.stall_permille =
            self.stall_permille.get().and_then(|permille| u32::try_from(permille).ok());
        let vms = self.vms.into_values().map(MergingVm::end).collect();
        Some(Top { at_unix_ms, host, vms })
    }
}

impl MergingVm {
    fn new(vm: TopVm) -> MergingVm {
        let [mut faults_per_s, mut refaulted_bytes_per_s] = [Mean::default(), Mean::default()];
        faults_per_s.add(vm.faults_per_s);
        refaulted_bytes_per_s.add(vm.refaulted_bytes_per_s);
        let mut fault_counts = FaultSums::default();
        fault_counts.add(vm.fault_ns.as_ref());
        MergingVm { last: vm, faults_per_s, fault_counts, refaulted_bytes_per_s }
    }

    fn add(&mut self, vm: TopVm) {
        self.faults_per_s.add(vm.faults_per_s);
        self.fault_counts.add(vm.fault_ns.as_ref());
        self.refaulted_bytes_per_s.add(vm.refaulted_bytes_per_s);
        let before = std::mem::replace(&mut self.last, vm);
        self.last.misses_memory |= before.misses_memory;
        self.last.waits |= before.waits;
        self.last.waiting_touches = self.last.waiting_touches.max(before.waiting_touches);
    }

    fn end(self) -> TopVm {
        TopVm {
            faults_per_s: self.faults_per_s.get(),
            fault_ns: self.fault_counts.get(),
            refaulted_bytes_per_s: self.refaulted_bytes_per_s.get(),
            ..self.last
        }
    }
}

impl FaultSums {
    fn add(&mut self, seen: Option<&FaultSpread>) {
        // Another release may have more groups.
        let Some(seen) = seen.filter(|seen| seen.counts.len() <= GROUPS) else { return };
        let sums = self.0.get_or_insert([0; GROUPS]);
        for (sum, count) in sums.iter_mut().zip(&seen.counts) {
            *sum = sum.saturating_add(*count);
        }
    }

    fn get(&self) -> Option<FaultSpread> {
        self.0.as_ref().map(spread)
    }
}

impl Mean {
    fn add(&mut self, number: Option<u64>) {
        if let Some(number) = number {
            self.sum += u128::from(number);
            self.count += 1;
        }
    }

    /// `None`: nothing was known.
    fn get(&self) -> Option<u64> {
        u64::try_from(self.sum.checked_div(self.count)?).ok()
    }
}
