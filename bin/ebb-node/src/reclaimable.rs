//! What VMs could give back, by the figures that `ebbd` has at hand.

use std::collections::BTreeMap;

use ebb_api::{PilotStatus, PilotVm, State, Top, TopVm, VmClass};
use ebb_policy::pilot::Class;

/// Free memory that reclaim leaves in each guest.
const RESERVE_BYTES: u64 = 64 << 20;
/// Figures that are older say nothing about now.
const AGE_MOST_MS: u64 = 5000;

/// Host memory that all VMs could give back without slowing their guests: free memory, and memory
/// that they do not work with. A VM of which nothing is known gives nothing.
pub fn bytes(top: &Top, pilot: &PilotStatus) -> u64 {
    let piloted: BTreeMap<_, _> = pilot.vms.iter().map(|vm| (vm.name.as_str(), vm)).collect();
    let each = top.vms.iter().map(|vm| of_vm(vm, piloted.get(vm.name.as_str()).copied()));
    each.fold(0, u64::saturating_add)
}

fn of_vm(vm: &TopVm, piloted: Option<&PilotVm>) -> u64 {
    let is_fresh = vm.age_ms.is_some_and(|age_ms| age_ms <= AGE_MOST_MS);
    let may_give = vm.state == State::Managed && !vm.hold && !vm.waits;
    let Some(parts) = vm.parts.filter(|_| is_fresh && may_give) else { return 0 };
    let free = parts.free_bytes.unwrap_or(0).saturating_sub(RESERVE_BYTES);
    let cold = piloted.filter(|_| !vm.misses_memory).and_then(cold_above);
    free.max(cold.map_or(0, |above| parts.resident_bytes().saturating_sub(above)))
}

/// What a VM keeps if all of its cold memory goes. `None`: a limit cannot take any, or what the VM
/// works with is not known.
fn cold_above(vm: &PilotVm) -> Option<u64> {
    let working = vm.working_bytes.filter(|_| vm.left_alone.is_none())?;
    let slack = working / class(vm.class).slack_part();
    Some(working.saturating_add(slack).max(vm.min_bytes.unwrap_or(0)))
}

fn class(class: VmClass) -> Class {
    match class {
        VmClass::Batch => Class::Batch,
        VmClass::Normal => Class::Normal,
        VmClass::Latency => Class::Latency,
    }
}

#[cfg(test)]
mod tests {
    use ebb_api::{MemoryParts, PilotMode, TopHost};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A VM with 300 MiB of free memory and 700 MiB in use, of which nothing else is known.
    fn vm(name: &str) -> TopVm {
        let (in_use_bytes, free_bytes) = (700 * MIB, Some(300 * MIB));
        TopVm {
            name: name.parse().unwrap(),
            state: State::Managed,
            state_reason: None,
            age_ms: Some(800),
            memory_bytes: 1000 * MIB,
            parts: Some(MemoryParts { in_use_bytes, free_bytes, ..MemoryParts::default() }),
            compressed_in_bytes: 0,
            limit_bytes: None,
            limit_by_pilot: false,
            working_bytes: None,
            faults_per_s: None,
            fault_ns: None,
            refaulted_bytes_per_s: None,
            misses_memory: false,
            waits: false,
            waiting_touches: 0,
            class: VmClass::Normal,
            hold: false,
            warnings: 0,
        }
    }

    /// The same VM as the pilot sees it, if it works with 400 MiB.
    fn piloted(name: &str) -> PilotVm {
        PilotVm {
            name: name.parse().unwrap(),
            class: VmClass::Normal,
            weight: 100,
            min_bytes: None,
            max_bytes: None,
            hold: false,
            memory_bytes: 1000 * MIB,
            resident_bytes: 1000 * MIB,
            working_bytes: Some(400 * MIB),
            limit_bytes: None,
            compressed_most_bytes: None,
            unplugged_bytes: 0,
            left_alone: None,
        }
    }

    fn reclaimable(top: Vec<TopVm>, pilot: Vec<PilotVm>) -> u64 {
        let host = TopHost {
            total_bytes: 0,
            available_bytes: 0,
            reserve_bytes: 0,
            bounds: Vec::new(),
            stall_permille: None,
            pilot: PilotMode::Off,
            stage: None,
        };
        let status = PilotStatus {
            mode: PilotMode::Off,
            reserve_percent: None,
            reserve_bytes: None,
            attach: false,
            stall_percent: None,
            swap_max_bytes: None,
            stage: None,
            host: None,
            vms: pilot,
            decisions: Vec::new(),
        };
        bytes(&Top { at_unix_ms: 0, host, vms: top }, &status)
    }

    #[test]
    fn free_memory_counts_and_cold_memory_where_it_is_known() {
        assert_eq!(reclaimable(vec![], vec![]), 0);
        assert_eq!(reclaimable(vec![vm("a"), vm("b")], vec![]), 2 * 236 * MIB);
        // It keeps 400 MiB and a quarter of that.
        assert_eq!(reclaimable(vec![vm("a")], vec![piloted("a")]), 500 * MIB);
        assert_eq!(reclaimable(vec![vm("a")], vec![piloted("b")]), 236 * MIB);
        let batch = PilotVm { class: VmClass::Batch, ..piloted("a") };
        assert_eq!(reclaimable(vec![vm("a")], vec![batch]), 550 * MIB);
        let bound = PilotVm { min_bytes: Some(650 * MIB), ..piloted("a") };
        assert_eq!(reclaimable(vec![vm("a")], vec![bound]), 350 * MIB);
    }

    #[test]
    fn cold_memory_that_no_limit_takes_or_that_is_missed_does_not_count() {
        let alone = PilotVm { left_alone: Some("its limit is set".into()), ..piloted("a") };
        assert_eq!(reclaimable(vec![vm("a")], vec![alone]), 236 * MIB);
        let misses = TopVm { misses_memory: true, ..vm("a") };
        assert_eq!(reclaimable(vec![misses], vec![piloted("a")]), 236 * MIB);
    }

    #[test]
    fn a_vm_that_gives_nothing_or_is_not_known_counts_for_nothing() {
        let untrusted = MemoryParts { in_use_bytes: 1000 * MIB, ..MemoryParts::default() };
        for vm in [
            TopVm { state: State::Recovering, ..vm("a") },
            TopVm { hold: true, ..vm("a") },
            TopVm { waits: true, ..vm("a") },
            TopVm { age_ms: Some(5001), ..vm("a") },
            TopVm { age_ms: None, ..vm("a") },
            TopVm { parts: None, ..vm("a") },
            TopVm { parts: Some(untrusted), ..vm("a") },
        ] {
            let unknown = PilotVm { working_bytes: None, ..piloted("a") };
            assert_eq!(reclaimable(vec![vm.clone()], vec![unknown]), 0, "{vm:?}");
        }
    }
}
