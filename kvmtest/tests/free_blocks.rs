//! Free blocks are emptied under running vCPUs that take, fill and free them.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ebb_pager::Grain;
use kvmtest::until;
use testkit::require;

use kvmtest::blocks::{Blocks, FORGOTTEN, RELEASED, STRICT, TOUCHED, Way};

/// Empties blocks while the guest runs, until `enough` were emptied. Then empties all that is left
/// while the guest rests. Then the guest must find everything right again.
fn keeps_every_word(way: Way, vcpus: u64, enough: u64) {
    let blocks = Blocks::new(way);
    let began = Instant::now();
    let running = blocks.start(vcpus);
    blocks.wait_until_all_are_filled();
    let mut emptied = 0;
    until(format_args!("{enough} emptied blocks"), || {
        emptied += blocks.empty_free();
        (emptied >= enough).then_some(())
    });
    let taken = blocks.finish(running);

    blocks.empty_free();
    assert_eq!(blocks.holes(), blocks.count());
    assert_eq!(
        blocks.recorded_frames(),
        if way.fill.is_some() { blocks.frames_in_all() } else { 0 }
    );

    let running = blocks.start(vcpus);
    blocks.wait_until_all_are_filled();
    let again = blocks.finish(running);
    let counters = &blocks.pager().counters();
    eprintln!("{way:?}");
    eprintln!(
        "  {emptied} emptied, {taken} + {again} taken, faults: {} missing, {} early, {} metadata, {:?}",
        counters.missing.load(Relaxed),
        counters.early.load(Relaxed),
        counters.metadata.load(Relaxed),
        began.elapsed(),
    );
}

#[test]
fn blocks_given_back_before_they_are_taken() {
    require!(kvmtest::available());
    keeps_every_word(STRICT, 1, 500);
    for (order, enough) in [(0, 4000), (4, 1000), (9, 16), (10, 8)] {
        keeps_every_word(Way { order, ..STRICT }, 2, enough);
    }
}

#[test]
fn blocks_given_back_by_touch() {
    require!(kvmtest::available());
    for way in [TOUCHED, FORGOTTEN, RELEASED] {
        keeps_every_word(way, 2, 1500);
        keeps_every_word(Way { order: 9, ..way }, 2, 16);
    }
}

#[test]
fn poisoned_blocks() {
    require!(kvmtest::available());
    for way in [STRICT, TOUCHED] {
        keeps_every_word(Way { fill: Some(0xaa), ..way }, 2, 1000);
    }
}

#[test]
fn blocks_given_back_as_huge_frames() {
    require!(kvmtest::available());
    for way in [STRICT, TOUCHED, FORGOTTEN, RELEASED] {
        keeps_every_word(Way { grain: Grain::Huge, order: 9, ..way }, 2, 16);
    }
}
