//! Tests of the hand: what it chooses, what it counts, and when a search ends.

mod forgetting;
mod huge_pages;

use super::fake::{Fake, WINDOW};
use super::windows::RIPE;
use super::*;

/// A hand over this many windows, and the current time.
fn hand(windows: u64) -> (Hand, Instant) {
    (Hand::new(Gfn(windows * WINDOW)), Instant::now())
}

/// What the hand chooses at that time.
fn choose(hand: &mut Hand, memory: &mut Fake, want: usize, now: Instant) -> Vec<Gfn> {
    memory.now.set(now);
    hand.choose(memory, want, now + 3600 * SECOND).unwrap()
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_frame_that_is_used_after_its_forgetting_stays() {
    let (mut hand, now) = hand(2);
    let mut memory = Fake::new(2);
    // Everything is forgotten before anything is known.
    choose(&mut hand, &mut memory, 1, now);
    memory.touch(100..1024);
    let mut chosen = choose(&mut hand, &mut memory, 100, now + SECOND);
    chosen.sort_unstable();
    assert!(chosen.iter().map(|gfn| gfn.0).eq(0..100), "{chosen:?}");
}

#[test]
fn a_frame_that_was_forgotten_just_now_counts_as_used() {
    for (later, is_told) in [(RIPE / 2, false), (RIPE, true)] {
        for forgetting in [Duration::ZERO, SECOND] {
            let (mut hand, now) = hand(1);
            let mut memory = Fake { forgetting, ..Fake::new(1) };
            // The last frames are used before the forgetting, the others after it.
            memory.mapped.borrow_mut()[..500].fill(false);
            choose(&mut hand, &mut memory, 1, now);
            memory.touch(0..500);
            let now = memory.now.get() + later;
            let chosen = choose(&mut hand, &mut memory, 12, now);
            assert_eq!(chosen.iter().all(|gfn| gfn.0 >= 500), is_told, "{later:?}: {chosen:?}");
        }
    }
}

#[test]
fn one_round_finds_everything_once() {
    let (mut hand, now) = hand(40);
    let mut memory = Fake::new(40);
    // There are two holes, and nothing may be evicted.
    memory.resident[..2 * WINDOW as usize].fill(false);
    memory.resident[30 * WINDOW as usize..33 * WINDOW as usize].fill(false);
    memory.stays = Box::new(|_| true);
    let mut steps = 0;
    while !hand.is_barren() {
        assert_eq!(choose(&mut hand, &mut memory, 64, now), []);
        steps += 1;
        assert!(steps <= 40, "it ends");
    }
    assert!(steps > 4, "a step is bounded");
    let mut looks = memory.looks.clone();
    looks.truncate(35);
    assert!(looks.iter().copied().eq((2..30).chain(33..40)), "{looks:?}");
    hand.begin_anew();
    assert!(!hand.is_barren());
}

#[test]
fn a_choice_ends_in_time() {
    let (mut hand, now) = hand(40);
    let mut memory = Fake { looking: SECOND, ..Fake::new(40) };
    for (seconds, looks) in [(3, 3), (0, 1)] {
        memory.now.set(now);
        hand.choose(&mut memory, 4096, now + seconds * SECOND).unwrap();
        assert_eq!(memory.looks.drain(..).count(), looks, "it goes on, and ends");
    }
}

#[test]
fn memory_of_holes_is_barren_at_once() {
    let (mut hand, now) = hand(3);
    let mut memory = Fake::new(3);
    memory.resident.fill(false);
    assert_eq!(choose(&mut hand, &mut memory, 64, now), []);
    assert!(hand.is_barren());
    let (mut none, _) = (Hand::new(Gfn(0)), ());
    let mut memory = Fake::new(0);
    assert_eq!(choose(&mut none, &mut memory, 64, now), []);
    assert!(none.is_barren());
}

#[test]
fn little_is_looked_at_for_little() {
    let (mut hand, now) = hand(1000);
    let mut memory = Fake::new(1000);
    memory.mapped.borrow_mut().fill(false);
    for step in 0..20 {
        let chosen = choose(&mut hand, &mut memory, 256, now + step * SECOND);
        assert_eq!(chosen.len(), 256);
        memory.evict(&chosen);
    }
    assert!(memory.looks.len() <= 60, "{:?}", memory.looks);
    let mut once = memory.looks.clone();
    once.dedup();
    assert_eq!(once, memory.looks, "it goes on");
}

/// If all frames are in use, the hand looks further, but not without end.
#[test]
fn memory_at_rest_is_found_further_on() {
    let (mut hand, now) = hand(64);
    let mut memory = Fake::new(64);
    memory.mapped.borrow_mut()[10 * WINDOW as usize..].fill(false);
    let chosen = choose(&mut hand, &mut memory, 512, now);
    assert!(chosen.iter().all(|gfn| gfn.huge().0 >= 10), "{chosen:?}");
    let (mut hand, mut memory) = (Hand::new(Gfn(64 * WINDOW)), Fake::new(64));
    assert_eq!(choose(&mut hand, &mut memory, 512, now).len(), 512);
    let looked = memory.looks.len() * WINDOW as usize;
    assert!(looked <= 512 * LOOKS_MOST + 512, "{looked}");
}

/// Page cache that comes back is no more in use than page cache that came for the first time. Other
/// memory that comes back is as much in use as memory that was used all the time.
#[test]
fn a_frame_that_comes_back_soon_counts_as_at_work() {
    for (kind, goes) in [(PageKind::File, 300), (PageKind::Anonymous, 0)] {
        let (mut hand, now) = hand(1);
        let mut memory = Fake { kind, ..Fake::new(1) };
        memory.stays = Box::new(|gfn| (0..300).contains(&gfn));
        let chosen = choose(&mut hand, &mut memory, 1, now);
        assert_eq!(chosen, [Gfn(300)]);
        memory.evict(&chosen);
        memory.resident[300] = true;
        memory.touch(0..512);
        memory.stays = Box::new(|_| false);
        assert_eq!(choose(&mut hand, &mut memory, 1, now + SECOND), [Gfn(goes)], "{kind:?}");
    }
}

#[test]
fn active_frames_and_those_of_the_kernel_are_counted() {
    let (mut hand, now) = hand(4);
    let mut memory = Fake::new(4);
    memory.kernel = 100..200;
    memory.mapped.borrow_mut().fill(false);
    memory.touch(0..300);
    memory.stays = Box::new(|_| true);
    // The first window says nothing about those after it.
    choose(&mut hand, &mut memory, 1, now);
    assert_eq!((hand.active_frames(), hand.kernel_frames()), (None, 100));
    while !hand.is_barren() {
        choose(&mut hand, &mut memory, 64, now);
    }
    assert_eq!((hand.active_frames(), hand.kernel_frames()), (Some(300), 100));
}

/// Memory that was returned is in use by nobody, not even by the kernel.
#[test]
fn evicted_memory_does_not_count_as_in_use_for_ever() {
    let (mut hand, mut now) = hand(16);
    let mut memory = Fake::new(16);
    memory.kernel = 0..16 * WINDOW;
    let mut turn = |hand: &mut Hand, memory: &mut Fake, seconds: u32| {
        for _ in 0..seconds {
            memory.mapped.borrow_mut().copy_from_slice(&memory.resident);
            now += SECOND;
            choose(hand, memory, 64, now);
        }
        (hand.active_frames(), hand.kernel_frames())
    };
    assert_eq!(turn(&mut hand, &mut memory, 20), (Some(16 * WINDOW), 16 * WINDOW));
    memory.resident[WINDOW as usize..].fill(false);
    // What was evicted counts as in use for a while. Of the kernel's memory, only what is resident
    // counts.
    assert_eq!(turn(&mut hand, &mut memory, 4), (Some(16 * WINDOW), WINDOW));
    assert_eq!(turn(&mut hand, &mut memory, 60), (Some(WINDOW), WINDOW));
}

/// Frames at rest that must stay are no choice: the hand looks further for others.
#[test]
fn memory_at_rest_that_stays_does_not_end_the_search() {
    let (mut hand, mut now) = hand(64);
    let mut memory = Fake::new(64);
    memory.mapped.borrow_mut().fill(false);
    // Half of the first windows is in use. The other half is at rest and must stay.
    let is_hot = |gfn: u64| gfn < 32 * WINDOW && gfn % WINDOW < 256;
    memory.stays = Box::new(move |gfn| gfn < 32 * WINDOW && !is_hot(gfn));
    let mut hot = 0;
    for _ in 0..20 {
        (0..64 * WINDOW).filter(|gfn| is_hot(*gfn)).for_each(|gfn| memory.touch(gfn..gfn + 1));
        now += SECOND / 2;
        let chosen = choose(&mut hand, &mut memory, 512, now);
        hot += chosen.iter().filter(|gfn| is_hot(gfn.0)).count();
    }
    // The search ends, but not because of what it found there.
    assert!(hot <= 2 * 512, "{hot} of 20 steps of 512");
}

/// The window was empty meanwhile, so its turn was never ended.
#[test]
fn a_frame_that_comes_back_late_counts_as_used_once() {
    for (seconds, is_due, is_at_work) in
        [(4, false, true), (4, true, true), (60, false, false), (60, true, false)]
    {
        let (mut hand, now) = hand(2);
        let mut memory = Fake::new(2);
        choose(&mut hand, &mut memory, 1024, now);
        let frames: Vec<Gfn> = (0..WINDOW).map(Gfn).collect();
        memory.evict(&frames);
        let now = now + seconds * SECOND;
        memory.resident.fill(true);
        memory.mapped.borrow_mut().fill(true);
        // Its turn goes on: nothing is due to be forgotten, or the stop does not get there.
        hand.forgot_at = Some(now).filter(|_| !is_due);
        memory.forgets = Some(0);
        choose(&mut hand, &mut memory, 1, now);
        let uses = hand.windows.uses(Gfn(1), true);
        assert_eq!(uses.is_often(), is_at_work, "{seconds}: {uses:?}");
    }
}
