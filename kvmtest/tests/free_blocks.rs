//! Free blocks are reclaimed under running vCPUs that take, fill and free them.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ebb_pager::Grain;
use kvmtest::until;
use testkit::require;

use kvmtest::blocks::{Blocks, FORGOTTEN, RELEASED, STRICT, Settings, TOUCHED};

/// Reclaims blocks while the guest runs, until `enough` were reclaimed. Then reclaims all that is
/// left while the guest rests. Then the guest must find everything right again.
fn keeps_every_word(settings: Settings, vcpus: u64, enough: u64) {
    let blocks = Blocks::new(settings);
    let began = Instant::now();
    let running = blocks.start(vcpus);
    blocks.wait_until_all_are_filled();
    let mut reclaimed = 0;
    until(format_args!("{enough} reclaimed blocks"), || {
        reclaimed += blocks.reclaim_free();
        (reclaimed >= enough).then_some(())
    });
    let taken = blocks.finish(running);

    blocks.reclaim_free();
    assert_eq!(blocks.holes(), blocks.count());
    assert_eq!(
        blocks.recorded_frames(),
        if settings.fill.is_some() { blocks.frames_in_all() } else { 0 }
    );

    let running = blocks.start(vcpus);
    blocks.wait_until_all_are_filled();
    let again = blocks.finish(running);
    let counters = &blocks.pager().counters();
    eprintln!("{settings:?}");
    eprintln!(
        "  {reclaimed} reclaimed, {taken} + {again} taken, faults: {} missing, {} early, {} metadata, {:?}",
        counters.missing.load(Relaxed),
        counters.early.load(Relaxed),
        counters.metadata.load(Relaxed),
        began.elapsed(),
    );
}

#[test]
fn blocks_that_are_given_back_before_the_commit() {
    require!(kvmtest::available());
    keeps_every_word(STRICT, 1, 500);
    for (order, enough) in [(0, 4000), (4, 1000), (9, 16), (10, 8)] {
        keeps_every_word(Settings { order, ..STRICT }, 2, enough);
    }
}

#[test]
fn blocks_given_back_by_touch() {
    require!(kvmtest::available());
    for settings in [TOUCHED, FORGOTTEN, RELEASED] {
        keeps_every_word(settings, 2, 1500);
        keeps_every_word(Settings { order: 9, ..settings }, 2, 16);
    }
}

#[test]
fn poisoned_blocks() {
    require!(kvmtest::available());
    for settings in [STRICT, TOUCHED] {
        keeps_every_word(Settings { fill: Some(0xaa), ..settings }, 2, 1000);
    }
}

#[test]
fn blocks_given_back_as_huge_frames() {
    require!(kvmtest::available());
    for settings in [STRICT, TOUCHED, FORGOTTEN, RELEASED] {
        keeps_every_word(Settings { grain: Grain::Huge, order: 9, ..settings }, 2, 16);
    }
}
