//! Linux with LLFree in the buddy allocator's place, without Ebb. Whatever a guest does to its
//! memory, trees, areas, bits and counters stay consistent.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use vmtest::{Disk, Guest, Host, Vm, assets, require, rounds, until};

const CONSISTENCY: &str = "/sys/kernel/debug/llfree";
const AREA_FRAMES: u64 = 512;
const HUGE_KIB: u64 = 2048;
/// The kernel takes pages for itself, but not many.
const LOST_KIB_MAX: u64 = 4096;

/// Offsets in the header, and flags of areas and trees, as in `docs/llfree.md`.
const HARD: u64 = 64;
const PURGE_ASKED: u64 = 72;
const PURGE_DONE: u64 = 80;
const AREA_FREE: u16 = 512;
const AREA_EVICTED: u16 = 1 << 14;
const AREA_ALLOCATED: u16 = 1 << 15;
const TREE_AREAS: u64 = 8;
const TREE_FREE_MASK: u32 = 0x1fff;
const TREE_EVICTED: u32 = 1 << 16;

fn guest() -> Guest {
    Guest::debian("llfree")
}

fn start(guest: Guest) -> Vm {
    let vm = Host::new().qemu(guest);
    vm.guest("mount debugfs debugfs /sys/kernel/debug");
    vm
}

/// What a zone says of itself: the word before each number; `zone` is its node.
type Zone = HashMap<String, u64>;

/// All zones, once the kernel has found them consistent.
fn zones(vm: &Vm) -> Vec<Zone> {
    let text = vm.guest(&format!("cat {CONSISTENCY}"));
    assert!(text.trim_end().ends_with("\nOK"), "{text}");
    text.lines().filter(|line| line.starts_with("zone ")).map(zone).collect()
}

/// Parses `zone 0 DMA32: header 1ff80000 base 0 frames 131040 free 9 ... blocks 17 11 ...`.
fn zone(line: &str) -> Zone {
    let words: Vec<&str> = line.split_whitespace().collect();
    let pairs = words.windows(2).filter_map(|pair| match pair {
        ["header", number] => Some(("header", u64::from_str_radix(number, 16).ok()?)),
        [name, number] if name.parse::<u64>().is_err() => Some((*name, number.parse().ok()?)),
        _ => None,
    });
    pairs.map(|(name, number)| (name.to_owned(), number)).collect()
}

fn sum(zones: &[Zone], name: &str) -> u64 {
    zones.iter().map(|zone| zone[name]).sum()
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

fn works_with(cpus: u32) {
    require!(assets::kernel("llfree"));
    let vm = start(guest().cpus(cpus).memory("512M"));
    let before = unaccounted_kib(&vm);
    work(&vm, 400);
    let after = unaccounted_kib(&vm);
    assert!(after < before + LOST_KIB_MAX, "{before} KiB unaccounted for before, {after} after");
    vm.power_off();
}

#[test]
fn one_processor() {
    works_with(1);
}

#[test]
fn two_processors() {
    works_with(2);
}

#[test]
fn four_processors() {
    works_with(4);
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
    let content = vm.scatter(3000);
    let scattered = sum(&zones(&vm), "hugefree");
    vm.guest("compact");
    let compacted = sum(&zones(&vm), "hugefree");
    // 140 MiB were freed in pieces of 48 KiB.
    assert!(compacted >= scattered + 40, "{scattered} free areas before, {compacted} after");
    assert_eq!(vm.scattered(), content);
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

/// What the host reads and writes of a guest's only zone while its processors stand still.
struct Words {
    ram: File,
    header: u64,
}

impl Words {
    fn of(vm: &Vm) -> Words {
        let zones = zones(vm);
        assert_eq!(zones.len(), 1);
        let entries = fs::read_dir(format!("/proc/{}/fd", vm.pid())).expect("QEMU runs");
        let mut paths = entries.flatten().map(|entry| entry.path());
        let is_ram = |path: &std::path::PathBuf| {
            let target = fs::read_link(path).unwrap_or_default();
            let long = fs::metadata(path).is_ok_and(|file| file.len() > 32 << 20);
            long && target.to_string_lossy().starts_with("/memfd:")
        };
        let ram = paths.find(is_ram).expect("the guest's RAM");
        let ram = File::options().read(true).write(true).open(ram).expect("the guest's RAM");
        Words { ram, header: zones[0]["header"] }
    }

    fn read<const N: usize>(&self, gpa: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.ram.read_exact_at(&mut bytes, gpa).expect("RAM");
        bytes
    }

    fn write(&self, gpa: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, gpa).expect("RAM");
    }

    fn header(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.read(self.header + offset))
    }

    fn add_to_header(&self, offset: u64, by: i64) {
        let word = self.header(offset).wrapping_add_signed(by);
        self.write(self.header + offset, &word.to_le_bytes());
    }

    fn area(&self, index: u64) -> u16 {
        u16::from_le_bytes(self.read(self.header(40) + 2 * index))
    }

    fn areas(&self) -> u64 {
        self.header(24).div_ceil(AREA_FRAMES)
    }

    /// Changes an area, and counts that in its tree.
    fn set_area(&self, index: u64, area: u16) {
        let before = self.area(index);
        let at = self.header(48) + 4 * (index / TREE_AREAS);
        let tree = u32::from_le_bytes(self.read(at));
        let free = |area: u16| u32::from(area & 0x3ff);
        let evicted = |area: u16| if area & AREA_EVICTED == 0 { 0 } else { TREE_EVICTED };
        let frames = (tree + free(area)).wrapping_sub(free(before)) & TREE_FREE_MASK;
        let rest = (tree & !TREE_FREE_MASK) + evicted(area) - evicted(before);
        self.write(at, &(rest | frames).to_le_bytes());
        self.write(self.header(40) + 2 * index, &area.to_le_bytes());
    }

    /// Areas that are free as a whole. The flag for the direction in which bits are read does not
    /// matter.
    fn free(&self) -> Vec<u64> {
        (0..self.areas()).filter(|&index| self.area(index) & !(1 << 13) == AREA_FREE).collect()
    }
}

#[test]
fn what_the_host_has_taken_leaves_the_totals() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().memory("512M"));
    let words = Words::of(&vm);
    let total_kib = field(&vm, "meminfo", "MemTotal");
    let taken = vm.stopped(|| {
        let taken: Vec<u64> = words.free().into_iter().take(100).collect();
        for &index in &taken {
            let turned = words.area(index) & 1 << 13;
            words.set_area(index, turned | AREA_ALLOCATED | AREA_EVICTED);
        }
        words.add_to_header(HARD, 100);
        taken
    });
    assert_eq!(taken.len(), 100);
    assert_eq!(field(&vm, "meminfo", "MemTotal"), total_kib - 100 * HUGE_KIB);
    let zones_now = zones(&vm);
    assert_eq!((zones_now[0]["said"], zones_now[0]["hosts"]), (100, 100));
    // The guest uses up what is left, and nothing that the host has taken.
    vm.forgive();
    vm.try_guest("sh busybox tail /dev/zero").expect_err("it is killed");
    zones(&vm);
    vm.stopped(|| {
        for &index in &taken {
            let area = words.area(index);
            assert_eq!(area & !(1 << 13), AREA_ALLOCATED | AREA_EVICTED);
            words.set_area(index, area & 1 << 13 | AREA_FREE | AREA_EVICTED);
        }
        words.add_to_header(HARD, -100);
    });
    assert_eq!(field(&vm, "meminfo", "MemTotal"), total_kib);
    assert_eq!(zones(&vm)[0]["hosts"], 0);
    // Frames without memory are touched before they are allocated, in any context.
    vm.guest("fill a 350M");
    assert_eq!(vm.guest("check a"), "0");
    zones(&vm);
}

#[test]
fn page_cache_is_purged_when_the_host_asks() {
    require!(assets::kernel("llfree"));
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "512M").formatted("ext4");
    let vm = with_disk(&host, &disk, guest().memory("512M"));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("fill a 100M");
    vm.guest("files f 250M /mnt");
    vm.guest("sh busybox sync");
    let words = Words::of(&vm);
    let before = zones(&vm);
    let asked = 150 << 8;
    vm.stopped(|| words.add_to_header(PURGE_ASKED, asked));
    until("the purge", || (words.header(PURGE_DONE) == words.header(PURGE_ASKED)).then_some(()));
    let after = zones(&vm);
    let (before, after) = (&before[0], &after[0]);
    assert!(after["free"] > before["free"] + (100 << 8), "{before:?} {after:?}");
    assert!(after["hugefree"] > before["hugefree"] + 40, "{before:?} {after:?}");
    assert_eq!(vm.guest("checkfiles f"), "0");
    assert_eq!(vm.guest("check a"), "0");
    zones(&vm);
}

/// VMCOREINFO lies in a frame of the guest: its lines say where each header is.
#[test]
fn the_state_is_announced() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().memory("256M"));
    let words = Words::of(&vm);
    assert_eq!(&words.read::<8>(words.header), b"EBBLLFRE");
    let line = format!("LLFREE_ZONE_0_0={:x}\nLLFREE_ZONES=1\n", words.header);
    let mut frame = vec![0; 4096];
    let found = (0..256 << 8).any(|number: u64| {
        words.ram.read_exact_at(&mut frame, number << 12).expect("RAM");
        frame.windows(line.len()).any(|window| window == line.as_bytes())
    });
    assert!(found, "no {line:?} in the guest's memory");
}

/// Writes ten files with a hundred functions each; the program adds up what they return.
const PROGRAM: &str = "export PATH=/usr/bin:/bin; cd /tmp && for file in 0 1 2 3 4 5 6 7 8 9; do \
    { i=0; while [ $i -lt 100 ]; do echo \"int f${file}_$i(int x) { return x * $i + $file; }\"; \
    i=$((i+1)); done; echo \"int sum$file(void) { int s = 0;\"; \
    i=0; while [ $i -lt 100 ]; do echo \"s += f${file}_$i(1);\"; i=$((i+1)); done; \
    echo 'return s; }'; } >part$file.c; done; \
    { for file in 0 1 2 3 4 5 6 7 8 9; do echo \"int sum$file(void);\"; done; \
    echo 'int main(void) { return !('; \
    for file in 0 1 2 3 4 5 6 7 8 9; do echo \"sum$file() +\"; done; \
    echo '0 == 54000); }'; } >main.c; \
    printf 'OBJECTS := main.o $(foreach n,0 1 2 3 4 5 6 7 8 9,part$n.o)\\n\
main: $(OBJECTS)\\n\\tgcc -o $@ $^\\n' >Makefile; make -s -j4 CC=gcc CFLAGS=-O2 main && ./main";

/// Debian's compiler first, then all of Debian: systemd starts, and every file is checked against
/// its package.
#[test]
fn debian_runs() {
    require!(assets::kernel("llfree"));
    let userland = assets::userland();
    require!(userland.as_ref());
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "2G").formatted("ext4").filled(&userland.unwrap());
    let vm = with_disk(&host, &disk, guest().memory("512M"));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest(&format!("timed program /mnt {PROGRAM}"));
    zones(&vm);
    vm.guest("dropcaches");
    zones(&vm);
    vm.guest("umount /mnt");
    vm.leave("boot ext4 /dev/vda");
    vm.wait_console("every file was checked");
    let text = vm.console_text();
    let is_wrong = |line: &&str| line.contains("??5??????") || line.contains("missing  ");
    let wrong: Vec<&str> = text.lines().filter(is_wrong).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    vm.wait_end();
    disk.check("ext4");
}
