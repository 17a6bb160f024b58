//! Which memory a real guest uses, as its own page tables tell.

use ebb_heat::{Levels, Sorted, TOP_LEVEL, Walk, Weights};
use vmtest::tracked::Tracked;
use vmtest::{Guest, Host, assets, require};

/// Part of a program's memory that is used: one page in this many.
const PART: u64 = 5;
const WINDOWS: u32 = 8;

/// A guest with page-table isolation: the emulator keeps translations until page tables are
/// switched.
fn guest(label: &str, more: &str) -> Guest {
    Guest::debian(label).append(&format!("pti=on {more}"))
}

/// Takes as many of the hottest pages of all memory as are really used. Returns the part of them
/// that is really used.
fn precision(sorted: &Sorted, truth: &[u64]) -> f64 {
    let hot: Vec<u64> = sorted.hottest_first().take(truth.len()).map(|page| page.0.0).collect();
    let right = hot.iter().filter(|frame| truth.binary_search(frame).is_ok()).count();
    right as f64 / hot.len().max(1) as f64
}

/// Part of the really used pages whose degree is at least half the windows.
fn recall(levels: &Levels, truth: &[u64]) -> f64 {
    let is_found = |frame: &&u64| {
        let uses = levels.uses(ebb_units::Gfn(**frame));
        u32::from(uses.reads) + u32::from(uses.writes) >= WINDOWS / 2
    };
    truth.iter().filter(is_found).count() as f64 / truth.len() as f64
}

/// Monitors the guest once while its program works. A window ends when the program has used its
/// part three times more.
fn monitored(tracked: &Tracked, vm: &vmtest::Vm, levels: &mut Levels) -> Vec<ebb_heat::Round> {
    levels.begin();
    let mut rounds = vec![tracked.round(Walk::Full, levels)];
    for _ in 0..WINDOWS {
        vm.guest("hoton h 3");
        levels.next_window();
        rounds.push(tracked.round(Walk::Pruned, levels));
    }
    rounds
}

/// Checks that the hot part of 300 MiB is found, and nothing is damaged.
fn finds_the_hot_part(guest: Guest, unit: u64, prunes: bool) {
    let vm = Host::new().qemu(guest);
    let tracked = Tracked::take(&vm);
    vm.guest(&format!("hot h 300M {unit} {PART}"));
    let truth = tracked.frames(&vm, "h");
    // Rarely used memory, which must not count as hot.
    vm.guest("fill cold 100M");
    vm.guest("hoton h 2");
    let mut levels = tracked.levels(TOP_LEVEL);
    // The first monitoring begins with bits that were set since the boot.
    monitored(&tracked, &vm, &mut levels);
    let rounds = monitored(&tracked, &vm, &mut levels);
    let sorted = Sorted::new(&levels, Weights::EVEN);
    let (precision, recall) = (precision(&sorted, &truth), recall(&levels, &truth));
    println!(
        "precision {precision:.4}, recall {recall:.4}, {} of {} frames used",
        truth.len(),
        sorted.used_frames()
    );
    rounds.iter().for_each(|round| println!("{round:?}"));
    assert!(precision >= 0.98 && recall >= 0.98, "precision {precision}, recall {recall}");
    let cleared: u64 = rounds.iter().map(|round| round.cleared_entries).sum();
    assert!(cleared > truth.len() as u64 / unit, "{cleared} bits cleared");
    let pruned: u64 = rounds.iter().map(|round| round.pruned_tables).sum();
    assert_eq!(pruned > 0, prunes, "{pruned} tables left out");
    // Dirty pages are still dirty, and every byte is right.
    assert!(vm.guest("hotstop h").ends_with(" 0"));
    assert_eq!(vm.guest("check cold"), "0");
}

#[test]
fn small_pages_6_1() {
    finds_the_hot_part(guest("6.1-cloud", "transparent_hugepage=never"), 1, true);
}

#[test]
fn huge_pages_6_1() {
    finds_the_hot_part(guest("6.1-cloud", "transparent_hugepage=always"), 512, true);
}

#[test]
fn small_pages_5_10() {
    require!(assets::kernel("5.10"));
    finds_the_hot_part(guest("5.10", "transparent_hugepage=never"), 1, false);
}

#[test]
fn small_pages_6_12() {
    require!(assets::kernel("6.12"));
    finds_the_hot_part(guest("6.12", "transparent_hugepage=never"), 1, true);
}

#[test]
fn small_pages_7() {
    require!(assets::kernel("7.x"));
    finds_the_hot_part(guest("7.x", "transparent_hugepage=never"), 1, true);
}

/// Page tables come and go as fast as they can while every bit in them is cleared, round after
/// round. What was a page table a moment ago is data now, and must stay right.
#[test]
fn page_tables_that_become_data_are_left_alone() {
    let vm = Host::new().qemu(guest("6.1-cloud", ""));
    let tracked = Tracked::take(&vm);
    vm.guest("fill kept 200M");
    vm.churn("200M");
    let mut levels = tracked.levels(0);
    let (mut cleared, mut locked) = (0, 0);
    for _ in 0..vmtest::rounds(12, 400) {
        vm.churn_on(1);
        for _ in 0..10 {
            levels.begin();
            let round = tracked.round(Walk::Full, &mut levels);
            cleared += round.cleared_entries;
            locked += round.locked_frames;
        }
    }
    println!("{cleared} bits cleared, metadata locked {locked} times");
    assert!(cleared > 1000, "{cleared}");
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert_eq!(vm.guest("check kept"), "0");
}
