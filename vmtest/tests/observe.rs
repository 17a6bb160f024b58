//! `ebb observe` and `ebb discover`: what is known of VMs without touching them.

use std::fs;

use ebb_api::{DiscoveredVm, GuestUsage, ObservedVm};
use vmtest::{Disk, Guest, Host, HostSetting, Vm, assets, require, rounds, until_or};

const MIB: u64 = 1 << 20;

fn observed(vm: &Vm) -> ObservedVm {
    let text = vm.host().ebb(&format!("observe --pid {} --json", vm.pid())).ok();
    let mut all: Vec<ObservedVm> = serde_json::from_str(&text).expect("a list");
    assert_eq!(all.len(), 1, "{text}");
    all.remove(0)
}

fn usage(vm: &Vm) -> GuestUsage {
    let seen = observed(vm);
    seen.usage.unwrap_or_else(|| panic!("{:?}", seen.reason))
}

/// What the guest tells and what was observed differ by at most 1 % of its memory. The guest's own
/// figures before and after must agree with each other, as they do once it has come to rest.
fn assert_agrees(vm: &Vm) {
    let compared = until_or(|| {
        let before = vm.meminfo();
        let usage = vm.stopped(|| usage(vm));
        let after = vm.meminfo();
        let at_rest = before["MemFree"].abs_diff(after["MemFree"]) < MIB;
        at_rest.then_some((usage, after))
    });
    let (usage, told) = compared.expect("the guest's free memory changes all the time");
    let sum = |fields: &[&str]| fields.iter().map(|field| told[*field]).sum::<u64>();
    let pairs = [
        ("total", usage.total_bytes, told["MemTotal"]),
        ("free", usage.free_bytes, told["MemFree"]),
        ("cache", usage.cache_bytes, sum(&["Cached", "Buffers", "SwapCached"])),
        ("cold cache", usage.cold_cache_bytes, told["Inactive(file)"]),
        ("anonymous", usage.anonymous_bytes, told["AnonPages"]),
        ("slab", usage.slab_bytes, told["Slab"]),
    ];
    for (what, seen, told) in pairs {
        let apart = seen.abs_diff(told);
        assert!(apart <= usage.total_bytes / 100, "{what}: {seen} observed, {told} told");
    }
}

/// Gives the guest memory of all kinds.
fn use_memory(vm: &Vm) {
    vm.guest("fill kept 150M");
    vm.guest("files f 60M");
    vm.guest("fill freed 200M");
    vm.guest("free freed");
}

fn agrees(guest: Guest) {
    let vm = Host::new().qemu(guest);
    use_memory(&vm);
    assert_agrees(&vm);
}

#[test]
fn kernel_5_10() {
    require!(assets::kernel("5.10"));
    agrees(Guest::debian("5.10"));
}

#[test]
fn kernel_6_1() {
    agrees(Guest::debian("6.1-cloud"));
}

#[test]
fn kernel_6_12() {
    require!(assets::kernel("6.12"));
    agrees(Guest::debian("6.12"));
}

#[test]
fn kernel_7() {
    require!(assets::kernel("7.x"));
    agrees(Guest::debian("7.x"));
}

#[test]
fn private_memory() {
    agrees(Guest::debian("6.1-cloud").ram("ram"));
}

#[test]
fn memory_in_a_file_of_tmpfs() {
    agrees(Guest::debian("6.1-cloud").ram("file,share=on,mem-path=/dev/shm"));
}

#[test]
fn memory_on_both_sides_of_4_gib() {
    agrees(Guest::debian("6.1-cloud").machine("pc").memory("5G"));
    agrees(Guest::debian("6.1-cloud").machine("q35").memory("5G").ram("ram"));
}

#[test]
fn two_nodes() {
    agrees(Guest::debian("6.1-cloud").nodes(2).memory("2G"));
}

/// What a look could change: mappings, memory in use, and faults.
fn traces(vm: &Vm) -> (String, Vec<String>, Vec<String>) {
    let read = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", vm.pid())).unwrap();
    let smaps = read("smaps");
    let counted = ["Rss:", "Anonymous:", "Swap:", "VmFlags:"];
    let is_counted = |line: &&str| counted.iter().any(|start| line.starts_with(start));
    let memory = smaps.lines().filter(is_counted).map(str::to_owned).collect();
    // What follows the name: faults are fields 10 and 12 of all.
    let stat = read("stat");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (read("maps"), memory, vec![fields[7].to_owned(), fields[9].to_owned()])
}

/// QEMU is frozen meanwhile, since its own threads map memory even while its vCPUs are stopped.
#[test]
fn a_look_changes_nothing() {
    for ram in ["ram", "memfd,share=on"] {
        let vm = Host::new().qemu(Guest::debian("6.1-cloud").ram(ram));
        use_memory(&vm);
        vm.frozen(|| {
            let before = traces(&vm);
            for _ in 0..rounds(3, 20) {
                usage(&vm);
            }
            assert_eq!(traces(&vm), before, "{ram}");
        });
    }
}

#[test]
fn what_would_be_given_back_is_what_reclaim_then_gives_back() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud"));
    use_memory(&vm);
    vm.guest("write /proc/sys/vm/stat_refresh 1");
    let expected = usage(&vm).reclaimable_bytes;
    vm.attach();
    vm.wait_trusted();
    let report = vm.reclaim();
    let apart = report.bytes.abs_diff(expected);
    assert!(apart <= 32 * MIB, "{expected} expected, {} reclaimed", report.bytes);
    assert!(usage(&vm).reclaimable_bytes <= 32 * MIB);
    assert_agrees(&vm);
}

#[test]
fn a_boot_is_seen() {
    let vm = Host::new().qemu(Guest::debian("6.1-cloud"));
    use_memory(&vm);
    assert_agrees(&vm);
    vm.reboot();
    assert_agrees(&vm);
}

#[test]
fn what_is_no_vm_is_refused() {
    let host = Host::new();
    let own = std::process::id();
    let refused = host.ebb(&format!("observe --pid {own}")).refused();
    assert!(refused.contains("is no QEMU: ebb discover shows those that run"), "{refused}");
    let refused = host.ebb("observe --every 1ms").refused();
    assert!(refused.contains("100ms is the least"), "{refused}");
    assert!(!host.run_directory().exists(), "a look makes no run directory");
}

fn discovered(host: &Host, pid: i32) -> DiscoveredVm {
    let all: Vec<DiscoveredVm> =
        serde_json::from_str(&host.ebb("discover --json").ok()).expect("a list");
    all.into_iter().find(|vm| vm.pid == pid).expect("the VM")
}

#[test]
fn discovery_tells_what_stands_in_the_way() {
    let host = Host::new();
    let private = host.qemu(Guest::debian("6.1-cloud").memory("256M").ram("ram"));
    let found = discovered(&host, private.pid());
    let obstacle = found.obstacle.expect("an obstacle");
    assert!(obstacle.contains("memory-backend-memfd"), "{obstacle}");
    assert_eq!((found.name.as_deref(), found.memory_bytes), (Some(private.name()), 256 * MIB));

    let shared = host.qemu(Guest::debian("6.1-cloud").memory("256M"));
    let found = discovered(&host, shared.pid());
    assert_eq!((found.obstacle, found.managed_as), (None, None));
    shared.attach();
    let found = discovered(&host, shared.pid());
    assert_eq!((found.obstacle, found.managed_as.as_deref()), (None, Some(shared.name())));
}

/// These would take other VMs, of other tests or of the host.
mod alone {
    use super::*;

    /// Checks that no VM runs on the host that is not the test's.
    fn no_other_vms(host: &Host) -> Result<(), String> {
        let text = host.ebb("discover --json").ok();
        let others: Vec<DiscoveredVm> = serde_json::from_str(&text).expect("a list");
        match others.first() {
            None => Ok(()),
            Some(vm) => Err(format!("other VMs run on this host, as process {}", vm.pid)),
        }
    }

    #[test]
    fn memory_in_reserved_huge_pages() {
        let setting = HostSetting::reserved_huge_pages(1 << 30);
        require!(setting.as_ref());
        agrees(Guest::debian("6.1-cloud").ram("memfd,share=on,hugetlb=on,hugetlbsize=2M"));
    }

    #[test]
    fn all_vms_that_can_be_managed_are_attached() {
        let host = Host::new();
        require!(no_other_vms(&host));
        let private = host.qemu(Guest::debian("6.1-cloud").memory("256M").ram("ram"));
        let shared = host.qemu(Guest::debian("6.1-cloud").memory("256M"));
        let text = host.ebb("attach --all").ok();
        assert!(text.contains("1 cannot be managed: `ebb discover` says why"), "{text}");
        let pids: Vec<i32> = host.list().iter().map(|vm| vm.pid).collect();
        assert_eq!(pids, [shared.pid()], "{text}");
        let again = host.ebb("attach --all").ok();
        assert!(again.starts_with("there is no further VM that Ebb can manage"), "{again}");
        assert_eq!(private.guest("fill a 50M"), shared.guest("fill a 50M"));
        let disk = Disk::new(&host, "disk", "64M");
        let served = host.run(Guest::debian("6.1-cloud").memory("256M").own_disk(&disk));
        let detached = host.ebb("detach --all");
        assert_eq!(detached.code, Some(1), "{detached:?}");
        let stays = format!("{} stays managed: ", served.name());
        assert!(detached.stdout.contains(" is detached: "), "{detached:?}");
        assert!(detached.stdout.contains(&stays), "{detached:?}");
        let pids: Vec<i32> = host.list().iter().map(|vm| vm.pid).collect();
        assert_eq!(pids, [served.pid()], "{detached:?}");
        served.power_off();
        until_or(|| host.list().is_empty().then_some(()))
            .unwrap_or_else(|| panic!("{}", host.log()));
        assert_eq!(host.ebb("detach --all").ok(), "there is no VM to detach\n");
        assert_eq!(shared.guest("check a"), "0");
    }

    #[test]
    fn the_pilot_attaches_what_can_be_managed_but_not_what_was_detached() {
        let host = Host::new();
        require!(no_other_vms(&host));
        let first = host.qemu(Guest::debian("6.1-cloud").memory("256M"));
        host.ebb("pilot on --attach on").ok();
        let is_managed = |pid| host.list().iter().any(|vm| vm.pid == pid).then_some(());
        until_or(|| is_managed(first.pid())).unwrap_or_else(|| panic!("{}", host.log()));
        host.ebb(&format!("detach {}", first.name())).ok();
        let second = host.qemu(Guest::debian("6.1-cloud").memory("256M"));
        until_or(|| is_managed(second.pid())).unwrap_or_else(|| panic!("{}", host.log()));
        assert_eq!(is_managed(first.pid()), None, "{}", host.log());
        // A daemon that begins anew knows it, too.
        host.kill_daemon();
        let third = host.qemu(Guest::debian("6.1-cloud").memory("256M"));
        until_or(|| is_managed(third.pid())).unwrap_or_else(|| panic!("{}", host.log()));
        assert_eq!(is_managed(first.pid()), None, "{}", host.log());
        assert!(host.ebb("pilot").ok().contains("attach"), "the rule is shown");
    }
}
