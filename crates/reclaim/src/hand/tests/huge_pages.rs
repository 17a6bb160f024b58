//! Tests of memory in huge pages: which go whole, and which are broken up.

use super::*;
use crate::cost::Page;

#[test]
fn units_go_whole_or_not_at_all() {
    let now = Instant::now();
    let mut hand = Hand::new(Gfn(4 * WINDOW));
    let mut memory = Fake::new(4);
    memory.piece = Piece::Whole;
    memory.mapped.borrow_mut().fill(false);
    memory.touch(5..6);
    memory.resident[600] = false;
    memory.stays = Box::new(|gfn| (1500..1501).contains(&gfn));
    let chosen = choose(&mut hand, &mut memory, 512, now);
    assert!(chosen.iter().map(|gfn| gfn.0).eq(1536..2048), "{chosen:?}");
    memory.evict(&chosen);
    // The next choice has the frame that was used.
    let chosen = choose(&mut hand, &mut memory, 512, now);
    assert!(chosen.iter().map(|gfn| gfn.0).eq(0..512), "{chosen:?}");
    memory.evict(&chosen);
    assert_eq!(choose(&mut hand, &mut memory, 512, now), []);
}

/// Uses a huge page: each use is a use of all of it.
fn used_as_a_whole(memory: &Fake, window: u64) {
    memory.touch(window * WINDOW..(window + 1) * WINDOW);
}

/// A hand that forgot these windows a second ago, over memory in huge pages from then on.
fn hand_over_huge_pages(windows: u64) -> (Hand, Fake, Instant) {
    let (mut hand, now) = hand(windows);
    let mut memory = Fake { stays: Box::new(|_| true), ..Fake::new(windows) };
    memory.mapped.borrow_mut().fill(false);
    while !hand.is_barren() {
        choose(&mut hand, &mut memory, 512, now);
    }
    hand.begin_anew();
    (memory.stays, memory.piece) = (Box::new(|_| false), Piece::Breakable);
    (hand, memory, now + SECOND)
}

#[test]
fn memory_at_rest_goes_whole_and_memory_in_use_is_broken_up() {
    let (mut hand, mut memory, mut now) = hand_over_huge_pages(4);
    let broken = |memory: &Fake| memory.broken.borrow().clone().unwrap();
    (0..3).for_each(|window| used_as_a_whole(&memory, window));
    let chosen = choose(&mut hand, &mut memory, 512, now);
    assert!(chosen.iter().all(|gfn| gfn.huge().0 == 3) && chosen.len() == 512);
    memory.evict(&chosen);
    assert_eq!(broken(&memory), []);
    // Two windows, for as much as is likely to be at rest in them. Which frames are is not known
    // yet.
    assert_eq!(choose(&mut hand, &mut memory, 200, now).len(), 0);
    let windows = broken(&memory);
    assert_eq!(windows.len(), 2, "{windows:?}");
    // It is known a turn later.
    let at_rest = windows[0].0 * WINDOW + 7;
    let first = (0..6).map(|_| {
        now += 3 * SECOND;
        (0..3).for_each(|window| used_as_a_whole(&memory, window));
        memory.mapped.borrow_mut()[at_rest as usize] = false;
        choose(&mut hand, &mut memory, 64, now).first().copied()
    });
    assert!(first.collect::<Vec<_>>().contains(&Some(Gfn(at_rest))));
}

/// If something in use had to be evicted, windows ahead are broken up in time.
#[test]
fn windows_are_broken_up_ahead_for_as_much_as_had_to_go() {
    let (mut hand, mut memory, mut now) = hand_over_huge_pages(8);
    memory.broken.replace(Some(vec![HugeFrame(0), HugeFrame(1)]));
    let mut evicted = 0;
    for _ in 0..3 {
        (0..8).for_each(|window| used_as_a_whole(&memory, window));
        let chosen = choose(&mut hand, &mut memory, 64, now);
        evicted += chosen.len();
        now += 3 * SECOND;
    }
    let broken = memory.broken.borrow().as_ref().unwrap().len() - 2;
    assert!(evicted > 0 && (1..=3).contains(&broken), "{broken} for {evicted} frames");
}

#[test]
fn a_huge_frame_that_is_used_no_more_goes_whole() {
    let (mut hand, mut memory, now) = hand_over_huge_pages(4);
    for _ in 0..2 {
        hand.windows.see(FrameRange::huge(HugeFrame(3)));
        hand.windows.end_turn(3, now - SECOND);
        hand.windows.pass(3);
    }
    let uses = hand.windows.uses(HugeFrame(3).first(), true);
    let page = Page { kind: Some(PageKind::Anonymous), ..Page::default() };
    assert!(page.cost(uses).unwrap().work > Work::AtRest, "{uses:?}");
    (0..3).for_each(|window| used_as_a_whole(&memory, window));
    let chosen = choose(&mut hand, &mut memory, 512, now);
    assert!(chosen.iter().all(|gfn| gfn.huge().0 == 3) && chosen.len() == 512);
    assert_eq!(memory.broken.borrow().as_deref(), Some(&[][..]));
}

/// For example, if a device uses one of its frames.
#[test]
fn memory_at_rest_with_a_part_that_stays_is_broken_up() {
    let (mut hand, mut memory, now) = hand_over_huge_pages(1);
    memory.stays = Box::new(|gfn| gfn == 7);
    let mut chosen = choose(&mut hand, &mut memory, 512, now);
    assert_eq!(memory.broken.borrow().as_deref(), Some(&[HugeFrame(0)][..]));
    chosen.sort_unstable();
    // This much of it is likely to be evicted.
    assert!(chosen.iter().map(|gfn| gfn.0).eq((0..129).filter(|gfn| *gfn != 7)), "{chosen:?}");
}

#[test]
fn a_huge_frame_that_stays_is_not_broken_up() {
    let (mut hand, mut memory, now) = hand_over_huge_pages(2);
    used_as_a_whole(&memory, 0);
    memory.stays = Box::new(|gfn| gfn < WINDOW);
    assert_eq!(choose(&mut hand, &mut memory, 600, now).len(), WINDOW as usize);
    assert_eq!(memory.broken.borrow().as_deref(), Some(&[][..]));
}

#[test]
fn a_huge_frame_that_cannot_be_broken_up_goes_whole() {
    let (mut hand, mut memory, now) = hand_over_huge_pages(4);
    memory.broken.replace(None);
    (0..4).for_each(|window| used_as_a_whole(&memory, window));
    assert_eq!(choose(&mut hand, &mut memory, 512, now).len(), 0);
    let failure = hand.take_failure().unwrap();
    assert_eq!(failure.kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(choose(&mut hand, &mut memory, 512, now).len(), WINDOW as usize);
    assert!(hand.take_failure().is_none());
    (0..4).for_each(|window| used_as_a_whole(&memory, window));
    choose(&mut hand, &mut memory, 512, now + BREAK_AGAIN);
    assert!(hand.take_failure().is_some(), "it is tried again");
}
