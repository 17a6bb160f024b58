//! What `ebb observe` and `ebb discover` found.

use ebb_api::{DiscoveredVm, ObservedVm};
use ebb_units::Bytes;

use super::table;

/// Returns a line for each VM with what its guest uses, and below why something is not known.
pub fn observed(vms: &[ObservedVm]) -> String {
    if vms.is_empty() {
        return "no QEMU runs on this host\n".into();
    }
    let head = [
        "NAME",
        "PID",
        "MEMORY",
        "RESIDENT",
        "USED",
        "ANON",
        "SLAB",
        "CACHE",
        "FREE",
        "RECLAIMABLE",
    ];
    let lines: Vec<[String; 10]> =
        std::iter::once(head.map(String::from)).chain(vms.iter().map(usage)).collect();
    let reason = |vm: &ObservedVm| Some(line(&vm.name, vm.pid, vm.reason.as_ref()?));
    table(&lines) + &vms.iter().filter_map(reason).collect::<String>()
}

fn usage(vm: &ObservedVm) -> [String; 10] {
    let size = |bytes: Option<u64>| bytes.map_or("?".into(), |bytes| Bytes(bytes).to_string());
    let part = |bytes: fn(&ebb_api::GuestUsage) -> u64| size(vm.usage.as_ref().map(bytes));
    [
        name(&vm.name),
        vm.pid.to_string(),
        size(vm.memory_bytes),
        size(vm.resident_bytes),
        part(|usage| usage.used_bytes),
        part(|usage| usage.anonymous_bytes),
        part(|usage| usage.slab_bytes),
        part(|usage| usage.cache_bytes),
        part(|usage| usage.free_bytes),
        part(|usage| usage.reclaimable_bytes),
    ]
}

/// Returns a line for each QEMU, and below what stands in the way of managing it.
pub fn discovered(vms: &[DiscoveredVm]) -> String {
    if vms.is_empty() {
        return "no QEMU runs on this host\n".into();
    }
    let head = ["NAME", "PID", "MEMORY", "STARTED BY", "EBB", "UUID"];
    let cells = |vm: &DiscoveredVm| {
        let state = match (&vm.managed_as, &vm.obstacle) {
            (Some(name), _) => format!("manages it as {name}"),
            (None, None) => "can manage it".into(),
            (None, Some(_)) => "cannot manage it".into(),
        };
        [
            name(&vm.name),
            vm.pid.to_string(),
            Bytes(vm.memory_bytes).to_string(),
            vm.manager.clone().unwrap_or_else(|| "-".into()),
            state,
            vm.uuid.clone().unwrap_or_else(|| "-".into()),
        ]
    };
    let lines: Vec<[String; 6]> =
        std::iter::once(head.map(String::from)).chain(vms.iter().map(cells)).collect();
    let why = |vm: &DiscoveredVm| Some(line(&vm.name, vm.pid, vm.obstacle.as_ref()?));
    table(&lines) + &vms.iter().filter_map(why).collect::<String>()
}

fn name(name: &Option<String>) -> String {
    name.clone().unwrap_or_else(|| "-".into())
}

/// What is to be said of a VM, on one line: processes choose parts of it.
fn line(name: &Option<String>, pid: i32, text: &str) -> String {
    let who = name.clone().unwrap_or_else(|| format!("process {pid}"));
    format!("{who}: {text}").replace(char::is_control, "?") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_marked_and_explained() {
        let vm = ObservedVm {
            pid: 7,
            name: Some("web".into()),
            memory_bytes: Some(1 << 30),
            resident_bytes: Some(1 << 29),
            usage: None,
            reason: Some("it\x1b boots".into()),
        };
        let text = observed(&[vm]);
        assert!(text.contains("web   7    1 GiB   512 MiB   ?     ?"), "{text}");
        assert!(text.ends_with("web: it? boots\n"), "{text}");
    }

    #[test]
    fn what_stands_in_the_way_is_below_the_table() {
        let vm = DiscoveredVm {
            pid: 7,
            name: None,
            uuid: None,
            manager: Some("libvirt".into()),
            memory_bytes: 1 << 30,
            managed_as: None,
            obstacle: Some("its RAM is no shared memfd: edit it".into()),
        };
        let text = discovered(std::slice::from_ref(&vm));
        assert!(text.contains("libvirt     cannot manage it"), "{text}");
        assert!(text.ends_with("process 7: its RAM is no shared memfd: edit it\n"), "{text}");
        let managed = DiscoveredVm { managed_as: Some("db".into()), obstacle: None, ..vm };
        assert!(discovered(&[managed]).contains("manages it as db"));
    }
}
