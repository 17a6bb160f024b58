//! How the daemon tells hot memory from cold, and what it does with that.

use std::collections::BTreeMap;
use std::fs;

use ebb_api::{HeatReport, HeatTracker, PoolStatus};
use ebb_sys::page_idle::PageIdle;
use vmtest::{Guest, Host, Vm, assets, until};

const MIB: u64 = 1 << 20;
const BLOCK_FRAMES: u64 = 512;

/// The daemon's report on hot memory.
fn heat(vm: &Vm, options: &str) -> HeatReport {
    let json = vm.ebb(&format!("heat --json {options}")).ok();
    serde_json::from_str(&json).expect("a report")
}

/// Number of pages of each block that the guest's program uses, by its own page tables.
fn truth(vm: &Vm, name: &str) -> BTreeMap<u64, u64> {
    let mut blocks = BTreeMap::new();
    for frame in vm.frames(&format!("hotframes {name}")) {
        *blocks.entry(frame / BLOCK_FRAMES).or_default() += 1;
    }
    blocks
}

/// The hot part of the blocks that the program uses, and of all others.
fn hot_parts(report: &HeatReport, truth: &BTreeMap<u64, u64>) -> (f64, f64) {
    let figures = report.figures.as_ref().expect("figures");
    assert_eq!(figures.block_bytes, BLOCK_FRAMES << 12);
    let (mut used, mut others) = ((0, 0), (0, 0));
    for region in &figures.regions {
        for (block, heat) in (region.start / figures.block_bytes..).zip(&region.blocks) {
            let (hot, all) = match truth.get(&block) {
                Some(pages) if *pages == BLOCK_FRAMES => &mut used,
                Some(_) => continue,
                None => &mut others,
            };
            *all += 1;
            *hot += u64::from(heat.degree >= f64::from(figures.windows) / 2.0);
        }
    }
    let part = |(hot, all): (u64, u64)| hot as f64 / all.max(1) as f64;
    println!("of {used:?} used and {others:?} other blocks hot; {} us", figures.looking_us);
    assert!(used.1 >= 10, "{used:?}");
    (part(used), part(others))
}

/// A fifth of 200 MiB is used all the time, in huge pages, each in a block of the map. Page-table
/// isolation is on since the emulator keeps translations until page tables are switched.
#[test]
fn the_hot_set_is_found() {
    let host = Host::new();
    let options = "pti=on transparent_hugepage=always";
    let vm = host.run(Guest::debian("6.1-cloud").memory("768M").append(options));
    vm.guest("hot h 200M 512 5");
    let truth = truth(&vm, "h");
    vm.guest("fill cold 100M");
    vm.guest("hoton h 3");
    // The guest may not be trusted before, but either way there is a report.
    vm.wait_trusted();
    let picture = host.directory().join("heat.svg");
    let report = heat(&vm, &format!("--svg {}", picture.display()));
    let figures = report.figures.as_ref().expect("figures");
    assert_eq!((figures.windows, figures.tracker), (8, HeatTracker::GuestTables), "{report:?}");
    let (used, others) = hot_parts(&report, &truth);
    assert!(used >= 0.9 && others <= 0.1, "{used} of the hot blocks, {others} of the others");
    let text = fs::read_to_string(&picture).expect("a picture");
    assert!(text.starts_with("<svg") && text.contains("#e53935"), "{text}");
    // The report was kept, not made anew.
    let again = heat(&vm, "").figures.expect("figures");
    assert_eq!((again.looking_us, again.duration_ms), (figures.looking_us, figures.duration_ms));
    let shown = vm.ebb("heat").ok();
    println!("{shown}");
    assert!(shown.contains("hot set") && shown.contains('█'), "{shown}");
    assert!(vm.guest("hotstop h").ends_with(" 0"));
    assert_eq!(vm.guest("check cold"), "0");
}

/// A VM with tiers is monitored automatically: hot memory stays and cold memory is evicted.
#[test]
fn the_fast_tier_keeps_what_is_hot() {
    let host = Host::new();
    let tiers = format!("dram=200M,file={}:312M", host.directory().join("slow").display());
    let options = "pti=on transparent_hugepage=always";
    let guest = Guest::debian("6.1-cloud").memory("512M").append(options).tier(&tiers);
    let vm = host.run(guest);
    vm.guest("hot h 100M 512 5");
    until("a monitoring of its own", || vm.status().tier.expect("tiers").hot_bytes);
    // Monitored while the program works.
    heat(&vm, "--fresh");
    // More than there is room for beside it.
    vm.guest("fill cold 200M");
    assert_eq!(vm.guest("check cold"), "0");
    let before = vm.status().limit.refilled_total_bytes;
    vm.guest("hoton h 20");
    let refilled = vm.status().limit.refilled_total_bytes - before;
    println!("{} KiB of 20 MiB brought back", refilled >> 10);
    assert!(refilled < 5 * MIB, "{refilled} bytes of the hot set were evicted");
    let tier = vm.status().tier.expect("tiers");
    let tier_bytes: Vec<u64> = tier.tiers.iter().map(|tier| tier.held_bytes).collect();
    assert!(tier_bytes[0] <= 248 * MIB && tier_bytes[1] > 50 * MIB, "{tier:?}");
    assert!(tier.hot_bytes > Some(10 * MIB), "{tier:?}");
    let warnings = vm.status().warnings;
    let is_told = |warning: &String| warning.contains("use of its memory is seen: an emulator");
    assert!(warnings.iter().any(is_told), "{warnings:?}");
    let shown = vm.ebb("tier").ok();
    assert!(shown.contains("of 200 MiB dram") && shown.contains("of 312 MiB file="), "{shown}");
    assert!(vm.guest("hotstop h").ends_with(" 0"));
    assert_eq!(vm.guest("check cold"), "0");
}

/// Two VMs share too little memory for both. What one does not need, the other gets, and the first
/// one gets its share back when it works.
#[test]
fn a_vm_gets_what_another_does_not_need() {
    let host = Host::new();
    let guest =
        || Guest::debian("6.1-cloud").memory("512M").append("pti=on transparent_hugepage=always");
    let (idle, busy) = (host.run(guest()), host.run(guest()));
    assert!(idle.ebb("share 200M").refused().contains("there is no pool"));
    host.ebb("pool 400M").ok();
    idle.guest("fill a 150M");
    busy.guest("hot h 300M 512 1");
    idle.wait_trusted();
    busy.wait_trusted();
    idle.ebb("share 200M").ok();
    assert!(busy.ebb("share 201M").refused().contains("leave 200 MiB"));
    assert!(busy.ebb("share 40M").refused().contains("keeps this guest alive"));
    busy.ebb("share 200M --lower 50").ok();
    assert_eq!(busy.status().limit.share_bytes, Some(200 * MIB));
    assert!(idle.ebb("limit 300M").refused().contains("share vm0 off"));
    assert!(host.ebb("pool 399M").refused().contains("make those smaller first"));
    assert!(host.ebb("pool off").refused().contains("take it out first"));
    let limits = || {
        let pool: PoolStatus = serde_json::from_str(&host.ebb("pool --json").ok()).expect("a pool");
        let limits: Vec<u64> = pool.vms.iter().map(|vm| vm.limit_bytes.expect("a limit")).collect();
        assert!(limits.iter().sum::<u64>() <= 400 * MIB, "{pool:?}");
        assert!(limits[0] >= 150 * MIB && limits[1] >= 100 * MIB, "{pool:?}");
        [limits[0] / MIB, limits[1] / MIB]
    };
    // Four fifths of 300 MiB, if it was seen at work in enough windows.
    until("the idle VM's surplus with the busy one", || {
        let [idle, busy] = limits();
        (idle == 150 && (225..=250).contains(&busy)).then_some(())
    });
    // The next daemon also knows how much each VM has.
    host.kill9();
    host.start();
    limits();
    assert_eq!(idle.guest("check a"), "0");
    idle.ebb("share off").ok();
    assert_eq!(idle.status().limit.bytes, None);
    assert!(busy.guest("hotstop h").ends_with(" 0"));
}

/// Before the guest's kernel is known, QEMU's page table tells what a guest uses: here, to boot.
#[test]
fn an_unknown_guest_is_seen_from_outside() {
    let host = Host::new();
    let kernel = assets::kernel("6.1-cloud").expect("a kernel");
    let [vmlinuz, initrd] = [&kernel.vmlinuz, &kernel.initrd].map(|path| path.display());
    let files = format!("--kernel {vmlinuz} --initrd {initrd}");
    host.ebb(&format!("run --name a --memory 512M {files} --append console=ttyS0")).ok();
    let json = host.ebb("heat a --json").ok();
    let report: HeatReport = serde_json::from_str(&json).expect("a report");
    let figures = report.figures.as_ref().expect("figures");
    let is_idle = figures.tracker == HeatTracker::IdlePages && PageIdle::open().is_ok();
    assert!(is_idle || figures.tracker == HeatTracker::VmmTable, "{report:?}");
    assert_eq!(figures.windows, 8, "{report:?}");
    assert!(figures.tracker_reason.contains("not trusted"), "{}", figures.tracker_reason);
    // A booting guest reads and writes megabytes, but does not use all of its memory all the time.
    assert!(figures.used_bytes > 4 * MIB && figures.hot_bytes < 400 * MIB, "{report:?}");
    assert!(figures.marks_cleared > 0 && figures.tables_read == 0, "{report:?}");
}
