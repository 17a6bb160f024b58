//! The list of all VMs.

use ebb_api::VmSummary;
use ebb_units::Bytes;

use super::{limit_or_none, state_word, table};

/// Returns one line for each VM.
pub fn list(vms: &[VmSummary]) -> String {
    if vms.is_empty() {
        return "no VM is managed\n".into();
    }
    let head = [
        "NAME", "PID", "STATE", "MODE", "TRUSTED", "AUTO", "LIMIT", "RESIDENT", "EVICTED", "MEMORY",
    ];
    let lines: Vec<[String; 10]> =
        std::iter::once(head.map(String::from)).chain(vms.iter().map(summary)).collect();
    let reason = |vm: &VmSummary| Some(format!("{}: {}\n", vm.name, vm.state_reason.as_ref()?));
    table(&lines) + &vms.iter().filter_map(reason).collect::<String>()
}

fn summary(vm: &VmSummary) -> [String; 10] {
    // A VM without an age has no figures yet.
    let known = |bytes| vm.age_ms.map_or_else(|| "?".into(), |_| Bytes(bytes).to_string());
    [
        vm.name.to_string(),
        vm.pid.to_string(),
        state_word(vm.state).into(),
        vm.mode.to_string(),
        if vm.trusted { "yes".into() } else { "no".into() },
        if vm.auto { "on".into() } else { "off".into() },
        limit_or_none(vm.limit_bytes),
        known(vm.resident_bytes),
        known(vm.evicted_bytes),
        Bytes(vm.memory_bytes).to_string(),
    ]
}
