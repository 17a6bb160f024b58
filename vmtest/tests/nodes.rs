//! VMs whose tiers are NUMA nodes. If this host has one node, each test runs in a guest that has
//! two, with the daemon, QEMU and the VM inside. That takes minutes: `cargo xtask soak nodes`.

use std::fs;

use ebb_api::Calibration;
use ebb_sys::numa;
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, HUGE_BYTES, Hva};
use serde_json::Value;
use vmtest::nested::{INNER_KERNEL, on_two_nodes};
use vmtest::{Guest, Host, HostSetting, Vm, until};

const MIB: u64 = 1 << 20;
const FAST: i32 = 0;
const SLOW: i32 = 1;
/// Memory that the guest touches before its pages are placed again.
const SLACK_BYTES: u64 = 24 * MIB;
/// A program's memory. It uses one page in [`PART`] again and again.
const PROGRAM: &str = "40M";
const PART: u64 = 5;

/// The emulator keeps translations until page tables are switched, so page-table isolation has it
/// switch them. One vCPU: an emulator in an emulator is slow enough.
fn guest(tiers: &str, huge_pages: &str) -> Guest {
    let options = format!("pti=on transparent_hugepage={huge_pages}");
    Guest::debian(INNER_KERNEL).memory("256M").cpus(1).append(&options).tier(tiers)
}

/// Starts a VM that is monitored every few seconds, with shorter monitorings than usual.
fn run(host: &Host, guest: Guest) -> Vm {
    let settings =
        [("EBB_HEAT_PERIOD_S", "2"), ("EBB_HEAT_WINDOWS", "4"), ("EBB_HEAT_WINDOW_MS", "500")];
    settings.into_iter().for_each(|(name, value)| host.set(name, value));
    let vm = host.run(guest);
    vm.wait_trusted();
    vm
}

/// Memory of the VM in each tier, in bytes.
fn tier_bytes(vm: &Vm) -> Vec<u64> {
    let tiers = vm.status().tier.expect("tiers").tiers;
    tiers.iter().map(|tier| tier.held_bytes).collect()
}

/// Pages of QEMU that the guest's program uses.
struct Hot {
    qemu: Process,
    pages: Vec<Hva>,
}

impl Hot {
    fn of(vm: &Vm, name: &str) -> Hot {
        let record = vm.host().run_directory().join("vms").join(vm.name()).join("vm.json");
        let record: Value =
            serde_json::from_slice(&fs::read(record).expect("its record")).expect("JSON");
        let regions = record["regions"].as_array().expect("its RAM");
        let number = |region: &Value, key| region[key].as_u64().expect("a number");
        let page = |gpa: u64| {
            let holds = |region: &&Value| {
                let gpas = number(region, "gpa")..number(region, "gpa") + number(region, "bytes");
                gpas.contains(&gpa)
            };
            let region = regions.iter().find(holds).expect("RAM");
            Hva(number(region, "hva") + (gpa - number(region, "gpa")))
        };
        let frames = vm.frames(&format!("hotframes {name}"));
        let pages = frames.into_iter().map(|frame| page(frame * FRAME_BYTES)).collect();
        Hot { qemu: Process::open(vm.pid()).expect("QEMU"), pages }
    }

    /// Percentage of these pages that are on a node.
    fn percent_on(&self, node: i32) -> usize {
        let mut statuses = vec![i32::MIN; self.pages.len()];
        numa::locate(&self.qemu, &self.pages, &mut statuses).expect("nodes");
        100 * statuses.iter().filter(|status| **status == node).count() / self.pages.len()
    }

    /// Moves them to the node where they should not be.
    fn move_to_slow(&self) {
        let mut statuses = vec![i32::MIN; self.pages.len()];
        numa::move_to(&self.qemu, &self.pages, SLOW as u32, &mut statuses).expect("moved");
        assert!(self.percent_on(SLOW) > 90, "on the slow node");
    }
}

/// What a guest works with is brought to the first node, also by the next daemon after one was
/// killed. Memory at rest makes way to the second node. No byte is lost.
#[test]
fn hot_pages_are_on_the_fast_node() {
    if on_two_nodes("hot_pages_are_on_the_fast_node") {
        return;
    }
    let host = Host::new();
    let vm = run(&host, guest("node0=128M,node1=128M", "never"));
    vm.guest("fill cold 70M");
    vm.guest(&format!("hot h {PROGRAM} 1 {PART}"));
    let holds = || {
        let [fast, slow] = tier_bytes(&vm)[..] else { panic!("two nodes") };
        println!("{} and {} MiB", fast / MIB, slow / MIB);
        fast <= 128 * MIB + SLACK_BYTES && slow > 30 * MIB
    };
    until("the first node to hold its share", || holds().then_some(()));
    let hot = Hot::of(&vm, "h");
    let is_fast = || {
        println!("{} % on the fast node", hot.percent_on(FAST));
        (hot.percent_on(FAST) >= 95).then_some(())
    };
    hot.move_to_slow();
    until("what is hot on the fast node", is_fast);
    hot.move_to_slow();
    host.kill9();
    host.start();
    until("the same by the next daemon", is_fast);
    assert!(holds(), "its share: {:?}", tier_bytes(&vm));
    assert!(vm.status().tier.expect("tiers").moved_bytes > Some(MIB));
    let shown = vm.ebb("tier").ok();
    assert!(shown.contains("of 128 MiB node0") && shown.contains("of 128 MiB node1"), "{shown}");
    assert!(vm.guest("hotstop h").ends_with(" 0"));
    assert_eq!(vm.guest("check cold"), "0");
    // An emulator's nodes are equally fast.
    let measured: Calibration =
        serde_json::from_str(&host.ebb("calibrate --json").ok()).expect("speeds");
    let names: Vec<&str> = measured.tiers.iter().map(|tier| tier.tier.as_str()).collect();
    assert!(names.starts_with(&["dram", "node0", "node1"]), "{names:?}");
    assert!(measured.tiers.iter().all(|tier| tier.read_ns > 0 && tier.write_ns > 0));
}

/// Bytes of this host's shared memory in huge pages.
fn shared_huge_bytes() -> u64 {
    let all = fs::read_to_string("/proc/meminfo").expect("meminfo");
    let line = all.lines().find_map(|line| line.strip_prefix("ShmemHugePages:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("huge pages of shared memory") << 10
}

/// Two nodes, and a file for the coldest pages.
#[test]
fn a_file_stands_behind_nodes() {
    if on_two_nodes("a_file_stands_behind_nodes") {
        return;
    }
    let host = Host::new();
    let file = host.directory().join("slow");
    let tiers = format!("node0=80M,node1=64M,file={}:112M", file.display());
    let vm = run(&host, guest(&tiers, "never"));
    vm.guest("fill cold 80M");
    vm.guest(&format!("hot h {PROGRAM} 1 {PART}"));
    until("each tier to hold its share", || {
        let [fast, slow, stored] = tier_bytes(&vm)[..] else { panic!("three tiers") };
        println!("{}, {} and {} MiB", fast / MIB, slow / MIB, stored / MIB);
        let fits = fast <= 80 * MIB + SLACK_BYTES && slow <= 64 * MIB + SLACK_BYTES;
        (fits && slow > 30 * MIB && stored > 30 * MIB).then_some(())
    });
    let hot = Hot::of(&vm, "h");
    until("what is hot on the fast node", || (hot.percent_on(FAST) >= 90).then_some(()));
    assert!(vm.guest("hotstop h").ends_with(" 0"));
    assert_eq!(vm.guest("check cold"), "0");
    assert!(vm.host_bytes() <= 144 * MIB + SLACK_BYTES, "{}", vm.host_bytes());
}

/// Tests that change a setting of the host, or whose time counts: no other test runs beside them.
mod alone {
    use super::*;

    /// Huge pages are exchanged whole: what a guest works with comes to the first node, and is in huge
    /// pages there.
    #[test]
    fn huge_pages_move_as_a_whole() {
        if on_two_nodes("alone::huge_pages_move_as_a_whole") {
            return;
        }
        let _huge_pages = HostSetting::shared_huge_pages().expect("huge pages");
        let host = Host::new();
        let vm = run(&host, guest("node0=128M,node1=128M", "always").backing("thp"));
        vm.guest("fill cold 70M");
        // Every second run of eight huge frames. If a run begins and ends within a huge frame, too
        // little of that huge frame is used.
        vm.guest(&format!("hot h {PROGRAM} {} 2", 8 * HUGE_BYTES / FRAME_BYTES));
        let hot = Hot::of(&vm, "h");
        hot.move_to_slow();
        let huge_bytes = shared_huge_bytes();
        assert!(huge_bytes > 150 * MIB, "{huge_bytes} bytes in huge pages");
        until("what is hot on the fast node", || {
            println!("{} % on the fast node, {:?} bytes", hot.percent_on(FAST), tier_bytes(&vm));
            let [fast, _] = tier_bytes(&vm)[..] else { panic!("two nodes") };
            (hot.percent_on(FAST) >= 85 && fast <= 128 * MIB + SLACK_BYTES).then_some(())
        });
        // Some of what moved may have been split, but not much of 24 MiB.
        let left_bytes = shared_huge_bytes();
        assert!(left_bytes + 8 * MIB > huge_bytes, "{left_bytes} of {huge_bytes} in huge pages");
        assert!(vm.status().tier.expect("tiers").moved_bytes > Some(MIB));
        assert!(vm.guest("hotstop h").ends_with(" 0"));
        assert_eq!(vm.guest("check cold"), "0");
    }
}
