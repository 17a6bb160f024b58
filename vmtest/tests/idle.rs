//! Guests that Ebb does not know, seen by the host kernel's idle page tracking. If this host has
//! none, the test runs in a guest whose kernel has it, with the daemon, QEMU and VMs inside.

use std::io;
use std::process::Command;

use ebb_api::{HeatReport, HeatTracker};
use ebb_heat::{HostPages, IdleTracker, Levels, Sorted, TOP_LEVEL, Tracker, Walk, Weights};
use ebb_sys::page_idle::PageIdle;
use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::FrameRange;
use ebb_vm::{Qmp, Ram, layout};
use vmtest::nested::{INNER_KERNEL, with_idle_tracking};
use vmtest::{Guest, Host, Ran, Vm, assets};

const MIB: u64 = 1 << 20;
/// A program's memory. It uses one page in [`PART`].
const PROGRAM: &str = "40M";
const PART: u64 = 5;
const WINDOWS: u8 = 8;

/// The page table of a QEMU. A process of its own removes pages from it, as the daemon does.
struct Forgotten(i32);

impl HostPages for Forgotten {
    fn forget(&self, ranges: &[HvaRange]) -> io::Result<()> {
        let mut command = Command::new(assets::program_directory().join("ebbd"));
        let start_ticks = Process::open(self.0)?.start_ticks()?;
        command.args(["inject", "forget", &self.0.to_string(), &start_ticks.to_string()]);
        let numbers = ranges.iter().flat_map(|range| [range.start.0, range.bytes]);
        Ran::of(command.args(numbers.map(|number| number.to_string()))).ok();
        Ok(())
    }
}

/// Monitors a VM once while its program works. A window ends when the program has used its part
/// three times more.
fn monitored(vm: &Vm, ram: &Ram) -> Levels {
    let pagemap = Process::open(vm.pid()).and_then(|qemu| Pagemap::open(&qemu));
    let pagemap = pagemap.expect("QEMU's page table");
    let (idle, pages) = (PageIdle::open().expect("idle page tracking"), Forgotten(vm.pid()));
    let frames: Vec<FrameRange> = ram.regions().map(|region| region.frames()).collect();
    let mut levels = Levels::new(&frames, TOP_LEVEL);
    let mut tracker = IdleTracker::new(ram, &pagemap, &idle, &pages, &|| true);
    println!("{:?}", tracker.round(Walk::Full, &mut levels).expect("a round"));
    for _ in 0..WINDOWS {
        vm.guest("hoton h 3");
        levels.next_window();
        println!("{:?}", tracker.round(Walk::Pruned, &mut levels).expect("a round"));
    }
    levels
}

/// Checks that Ebb finds what a guest's program uses without asking the guest.
fn finds_the_hot_part(host: &Host) {
    let guest = Guest::debian(INNER_KERNEL).memory("256M");
    let vm = host.qemu(guest.append("transparent_hugepage=never"));
    vm.guest(&format!("hot h {PROGRAM} 1 {PART}"));
    vm.guest("fill cold 50M");
    let truth = vm.frames("hotframes h");
    let mut qmp = Qmp::connect(&vm.own_qmp_socket()).expect("QMP");
    let qemu = Process::open(vm.pid()).expect("QEMU");
    let ram = layout::discover(&qemu, &mut qmp).expect("its RAM");
    let levels = monitored(&vm, &ram);
    let is_hot = |frame: &u64| {
        let uses = levels.uses(ebb_units::Gfn(*frame));
        uses.reads + uses.writes >= WINDOWS / 2
    };
    let found = truth.iter().filter(|frame| is_hot(frame)).count();
    let all = levels.all_uses().filter(|(gfn, _)| is_hot(&gfn.0)).count();
    let used = Sorted::new(&levels, Weights::EVEN).used_frames();
    println!("{found} of {} frames found hot, {all} in all, {used} used", truth.len());
    assert!(found * 100 >= truth.len() * 98, "what is used is found");
    // The guest's kernel uses memory as well: at most as much again.
    assert!(all <= 2 * truth.len(), "what rests is not hot");
    assert!(vm.guest("hotstop h").ends_with(" 0"));
    assert_eq!(vm.guest("check cold"), "0");
}

/// Checks that the daemon uses this for a guest that it does not know, if the host's kernel can.
fn is_the_daemons_choice(host: &Host) {
    let kernel = assets::kernel(INNER_KERNEL).expect("a kernel");
    let [vmlinuz, initrd] = [&kernel.vmlinuz, &kernel.initrd].map(|path| path.display());
    let files = format!("--kernel {vmlinuz} --initrd {initrd}");
    host.ebb(&format!("run --name a --memory 256M {files} --append console=ttyS0")).ok();
    let report: HeatReport = serde_json::from_str(&host.ebb("heat a --json").ok()).expect("JSON");
    let figures = report.figures.as_ref().expect("figures");
    assert_eq!((figures.tracker, figures.windows), (HeatTracker::IdlePages, WINDOWS), "{report:?}");
    assert!(figures.tracker_reason.contains("not trusted"), "{}", figures.tracker_reason);
    assert!(figures.used_bytes > MIB && figures.marks_cleared > 0, "{report:?}");
    let shown = host.ebb("heat a").ok();
    assert!(shown.contains("the host's idle page tracking"), "{shown}");
}

#[test]
fn an_unknown_guest_is_seen_by_idle_page_tracking() {
    if with_idle_tracking("an_unknown_guest_is_seen_by_idle_page_tracking") {
        return;
    }
    let host = Host::new();
    host.set("EBB_HEAT_WINDOW_MS", "4000");
    is_the_daemons_choice(&host);
    finds_the_hot_part(&host);
}
