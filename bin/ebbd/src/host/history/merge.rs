//! Several moments as one.

use std::collections::BTreeMap;

use ebb_api::{Top, TopVm, VmName};

/// Returns these moments, the latest last, as one: rates are means, whoever waited or missed memory
/// at any time did so, and all else is as it was last. `None`: there are none.
pub fn merge(all: &[Top]) -> Option<Top> {
    let last = all.last()?;
    let mut vms: BTreeMap<&VmName, Vec<&TopVm>> = BTreeMap::new();
    for vm in all.iter().flat_map(|top| &top.vms) {
        vms.entry(&vm.name).or_default().push(vm);
    }
    let stall_permille = mean(all.iter().filter_map(|top| top.host.stall_permille.map(u64::from)));
    let stall_permille = stall_permille.and_then(|permille| u32::try_from(permille).ok());
    let host = ebb_api::TopHost { stall_permille, ..last.host.clone() };
    let vms = vms.into_values().filter_map(|seen| merge_vm(&seen)).collect();
    Some(Top { at_unix_ms: last.at_unix_ms, host, vms })
}

fn merge_vm(seen: &[&TopVm]) -> Option<TopVm> {
    let last = (*seen.last()?).clone();
    let mean = |rate: fn(&TopVm) -> Option<u64>| mean(seen.iter().filter_map(|vm| rate(vm)));
    Some(TopVm {
        faults_per_s: mean(|vm| vm.faults_per_s),
        refaulted_bytes_per_s: mean(|vm| vm.refaulted_bytes_per_s),
        misses_memory: seen.iter().any(|vm| vm.misses_memory),
        waits: seen.iter().any(|vm| vm.waits),
        waiting_touches: seen.iter().map(|vm| vm.waiting_touches).max().unwrap_or(0),
        ..last
    })
}

fn mean(numbers: impl Iterator<Item = u64>) -> Option<u64> {
    let (sum, count) =
        numbers.fold((0u128, 0u128), |(sum, count), number| (sum + u128::from(number), count + 1));
    u64::try_from(sum.checked_div(count)?).ok()
}
