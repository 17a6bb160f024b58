//! What the host does to a guest's allocator: takes areas, asks for a purge, finds its header.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use vmtest::{Disk, Host, Vm, assets, require, until};

use crate::zones::zones;
use crate::{field, guest, start, with_disk};

const AREA_FRAMES: u64 = 512;
const HUGE_KIB: u64 = 2048;

/// Offsets in the header, and flags of areas and trees, as in `docs/llfree.md`.
const VERSION_CORES: u64 = 8;
const HARD: u64 = 64;
const PURGE_ASKED: u64 = 72;
const PURGE_DONE: u64 = 80;
const AREA_FREE: u16 = 512;
const AREA_EVICTED: u16 = 1 << 14;
const AREA_ALLOCATED: u16 = 1 << 15;
const TREE_AREAS: u64 = 8;
const TREE_FREE_MASK: u32 = 0x1fff;
const TREE_EVICTED: u32 = 1 << 16;
/// Where x86-64 kernels map the beginning of memory, beside their image.
const IMAGE_BASE: u64 = 0xffff_ffff_8000_0000;

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
fn reclaimed_memory_leaves_the_totals() {
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

/// All processors share the slots, unless the command line asks for slots of their own.
#[test]
fn the_command_line_says_how_slots_are_shared() {
    require!(assets::kernel("llfree"));
    let refusal = "llfree.reserve is \"type\" or \"core\"";
    let cases = [("", 1), ("llfree.reserve=core", 2), ("llfree.reserve=cores", 1)];
    for (words, cores) in cases {
        let vm = start(guest().cpus(2).append(words).memory("256M"));
        assert_eq!(Words::of(&vm).header(VERSION_CORES) >> 32, cores, "{words}");
        assert_eq!(vm.console().text().contains(refusal), words.ends_with("cores"), "{words}");
    }
}

/// VMCOREINFO lies in a frame of the guest: its lines say where each header is, and where the image
/// says so too.
#[test]
fn the_state_is_announced() {
    require!(assets::kernel("llfree"));
    let vm = start(guest().memory("256M"));
    let words = Words::of(&vm);
    assert_eq!(&words.read::<8>(words.header), b"EBBLLFRE");
    let line = format!("LLFREE_ZONE_0_0={:x}\nSYMBOL(llfree_headers)=", words.header);
    let mut frame = vec![0; 4096];
    let found = (0..256 << 8).find_map(|number: u64| {
        words.ram.read_exact_at(&mut frame, number << 12).expect("RAM");
        let text = String::from_utf8_lossy(&frame);
        text.split_once(&line).map(|(_, behind)| behind.lines().next().map(str::to_owned))
    });
    let address = found.flatten().unwrap_or_else(|| panic!("no {line:?} in the guest's memory"));
    let address = u64::from_str_radix(&address, 16).expect("an address");
    // The kernel is built without a random base, so its image is where it was linked to.
    let headers = words.read::<16>(address - IMAGE_BASE);
    let expected = [words.header.to_le_bytes(), [0; 8]].concat();
    assert_eq!(headers[..], expected);
}
