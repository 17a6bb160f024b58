//! Linux with LLFree in the buddy allocator's place, without Ebb. Whatever a guest does to its
//! memory, trees, areas, bits and counters stay consistent.

mod debian;
mod host;
mod zones;

use vmtest::{Disk, Guest, Host, ScatteredFiles, Vm, assets, require, rounds, until};

use zones::{Zone, sum, zones};

/// The kernel takes pages for itself, but not many.
const LOST_KIB_MAX: u64 = 4096;

fn guest() -> Guest {
    Guest::debian("llfree")
}

fn start(guest: Guest) -> Vm {
    let vm = Host::new().qemu(guest);
    vm.guest("mount debugfs debugfs /sys/kernel/debug");
    vm
}

/// A field of a file with lines `NAME NUMBER` or `NAME: NUMBER kB`.
fn field(vm: &Vm, file: &str, name: &str) -> u64 {
    number(&vm.guest(&format!("cat /proc/{file}")), name)
}

fn number(text: &str, name: &str) -> u64 {
    let mut lines = text.lines().map(|line| line.split_whitespace());
    let found = lines.find_map(|mut words| {
        (words.next()?.trim_end_matches(':') == name).then(|| words.next()?.parse().ok())?
    });
    found.unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// Several processes at once allocate memory of all kinds, check it and free it.
fn work(vm: &Vm, size_mib: u64) {
    vm.churn(&format!("{}M", size_mib / 2));
    vm.churn_on(3);
    vm.guest(&format!("fill a {}M", size_mib / 4));
    vm.guest(&format!("files f {}M", size_mib / 4));
    zones(vm);
    vm.guest("sh i=0; while [ $i -lt 200 ]; do busybox true & i=$((i+1)); done; wait");
    vm.churn_on(3);
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("check a"), "0");
    assert_eq!(vm.guest("checkfiles f"), "0");
    vm.guest("compact");
    zones(vm);
    assert_eq!(vm.guest("check a"), "0");
    assert_eq!(vm.guest("checkfiles f"), "0");
    vm.guest("free a");
    vm.guest("rmfiles f");
    vm.guest("dropcaches");
    zones(vm);
}

/// Memory in KiB that is neither free nor in use. It does not grow unless frames are lost.
fn unaccounted_kib(vm: &Vm) -> u64 {
    vm.guest("write /proc/sys/vm/stat_refresh 1");
    let text = vm.guest("cat /proc/meminfo");
    let known = ["MemFree", "AnonPages", "Cached", "Buffers", "Slab", "KernelStack", "PageTables"];
    let total = number(&text, "MemTotal");
    total - known.map(|name| number(&text, name)).iter().sum::<u64>()
}

fn works_with(cpus: u32, words: &str) {
    require!(assets::kernel("llfree"));
    let vm = start(guest().cpus(cpus).append(words).memory("512M"));
    let before = unaccounted_kib(&vm);
    work(&vm, 400);
    let after = unaccounted_kib(&vm);
    assert!(after < before + LOST_KIB_MAX, "{before} KiB unaccounted for before, {after} after");
    vm.power_off();
}

#[test]
fn one_processor() {
    works_with(1, "");
}

#[test]
fn two_processors() {
    works_with(2, "");
}

#[test]
fn four_processors() {
    works_with(4, "");
}

#[test]
fn two_processors_with_slots_of_their_own() {
    works_with(2, "llfree.reserve=core");
}

/// The machine has 2 GiB below the hole for devices, and the rest above 4 GiB.
#[test]
fn two_zones_and_what_is_taken_reaches_both() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().memory("2900M"));
    let before = zones(&vm);
    assert_eq!(before.len(), 2, "{before:?}");
    assert_eq!(before[1]["base"], 1 << 20, "{before:?}");
    vm.guest("fill a 1100M");
    assert_all_have_given(&before, &zones(&vm));
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("free a");
    work(&vm, 200);
}

fn assert_all_have_given(before: &[Zone], after: &[Zone]) {
    for (before, after) in before.iter().zip(after) {
        assert!(after["free"] + (100 << 8) < before["free"], "{before:?} {after:?}");
    }
}

#[test]
fn much_memory_above_4_gib() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().memory("5G"));
    let zones = zones(&vm);
    assert!(sum(&zones, "free") > 1_200_000, "{zones:?}");
    work(&vm, 200);
}

#[test]
fn two_nodes() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().machine("pc").nodes(2).memory("1G"));
    let before = zones(&vm);
    let nodes: Vec<u64> = before.iter().map(|zone| zone["zone"]).collect();
    assert_eq!(nodes, [0, 1]);
    vm.guest("fill a 700M");
    assert_all_have_given(&before, &zones(&vm));
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("free a");
    work(&vm, 400);
}

#[test]
fn huge_pages_are_had_and_split() {
    require!(assets::kernel("llfree"));
    // With less memory, the kernel leaves them off.
    let vm = start(guest().memory("768M"));
    vm.guest("fill a 200M");
    let huge_kib = field(&vm, "meminfo", "AnonHugePages");
    assert!(huge_kib > 150 << 10, "{huge_kib} KiB in huge pages");
    vm.guest("write /proc/sys/vm/nr_hugepages 40");
    assert_eq!(field(&vm, "meminfo", "HugePages_Total"), 40);
    zones(&vm);
    vm.guest("write /proc/sys/vm/nr_hugepages 0");
    assert_eq!(vm.guest("check a"), "0");
    vm.guest("free a");
    zones(&vm);
}

#[test]
fn compaction_makes_huge_pages_of_fragments() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().memory("512M"));
    let files = ScatteredFiles::make(&vm, 3000);
    let scattered = sum(&zones(&vm), "hugefree");
    vm.guest("compact");
    let compacted = sum(&zones(&vm), "hugefree");
    // 140 MiB were freed in pieces of 48 KiB.
    assert!(compacted >= scattered + 40, "{scattered} free areas before, {compacted} after");
    files.check();
    assert!(field(&vm, "vmstat", "pgmigrate_success") > 1000);
    vm.guest("sh busybox rm -r /tmp/keep");
    zones(&vm);
}

/// Kernel stacks and slabs want blocks of orders 1 to 3, where only single pages are left.
#[test]
fn blocks_are_had_in_fragmented_memory() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().memory("256M"));
    vm.guest(
        "sh busybox mkdir /tmp/a /tmp/b; i=0; while [ $i -lt 14000 ]; do \
         echo $i >/tmp/a/$i && echo $i >/tmp/b/$i || exit 1; i=$((i+1)); done; busybox rm -r /tmp/a",
    );
    vm.guest("sh i=0; while [ $i -lt 150 ]; do busybox sleep 1 & i=$((i+1)); done; wait");
    vm.guest("sh i=0; while [ $i -lt 14000 ]; do read n </tmp/b/$i; [ $n = $i ] || exit 1; i=$((i+1)); done");
    zones(&vm);
    vm.guest("sh busybox rm -r /tmp/b");
    zones(&vm);
}

/// A disk of QEMU's own.
fn with_disk(host: &Host, disk: &Disk, guest: Guest) -> Vm {
    let image = disk.image().display();
    let vm = host.qemu(guest.qemu_args(&format!("-drive file={image},if=virtio,format=raw")));
    vm.guest("mount debugfs debugfs /sys/kernel/debug");
    vm
}

#[test]
fn page_cache_is_kept_and_dropped() {
    require!(assets::kernel("llfree"));
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = with_disk(&host, &disk, guest().memory("384M"));
    vm.guest("mount ext4 /dev/vda /mnt");
    // More than there is memory: some of it is reclaimed.
    for name in ["a", "b"] {
        vm.guest(&format!("files {name} 180M /mnt"));
        vm.guest("sh busybox sync");
    }
    assert_eq!(vm.guest("checkfiles a"), "0");
    let cached = sum(&zones(&vm), "free");
    vm.guest("dropcaches");
    let dropped = sum(&zones(&vm), "free");
    assert!(dropped > cached + (100 << 8), "{cached} frames free before, {dropped} after");
    assert_eq!(vm.guest("checkfiles b"), "0");
    vm.guest("rmfiles a");
    vm.guest("rmfiles b");
    vm.guest("umount /mnt");
    zones(&vm);
    vm.power_off();
    disk.check("ext4");
}

#[test]
fn the_oom_killer_ends_what_takes_all() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().memory("256M"));
    vm.forgive();
    vm.guest("fill a 60M");
    for round in 1..=rounds(1, 3).into() {
        // The program keeps a line until it ends, and this one does not end.
        vm.try_guest("sh busybox tail /dev/zero").expect_err("it is killed");
        zones(&vm);
        let killed = field(&vm, "vmstat", "oom_kill");
        assert!(killed >= round, "{killed} killed in round {round}");
    }
    assert_eq!(vm.guest("check a"), "0");
    let others: Vec<String> =
        vm.complaints().into_iter().filter(|line| !line.contains("Out of memory")).collect();
    assert!(others.is_empty(), "{others:?}");
}

#[test]
fn a_balloon_works_without_reporting() {
    require!(assets::kernel("llfree"));
    let balloon = "-device virtio-balloon-pci,id=balloon,free-page-reporting=on";
    let vm = start(guest().memory("512M").qemu_args(balloon));
    let before = sum(&zones(&vm), "free");
    let target = (512_u64 - 200) << 20;
    vm.qmp("balloon", serde_json::json!({ "value": target }));
    until("the balloon", || {
        let answer = vm.qmp("query-balloon", serde_json::json!({}));
        (answer["actual"].as_u64() == Some(target)).then_some(())
    });
    let after = sum(&zones(&vm), "free");
    assert!(after + (190 << 8) < before, "{before} frames free before, {after} after");
    work(&vm, 200);
}
