//! Tests of forgetting: which windows, when, and how much of them at once.

use super::*;
use crate::hand::ahead::{FORGET_EVERY, FORGET_RANGES};

#[test]
fn pages_that_others_forget_are_seen_before() {
    let (mut hand, now) = hand(1);
    let mut memory = Fake::new(1);
    hand.note_mapped(FrameRange::new(Gfn(0), 500));
    hand.note_all_forgotten(now);
    memory.mapped.borrow_mut().fill(false);
    memory.touch(0..100);
    let chosen = choose(&mut hand, &mut memory, 12, now + SECOND);
    assert!(chosen.iter().all(|gfn| gfn.0 >= 500), "{chosen:?}");
    // A turn began when the page table was emptied.
    assert_eq!(memory.forgotten.take().concat(), []);
}

#[test]
fn forgetting_is_batched_and_rare() {
    let (mut hand, now) = hand(64);
    let mut memory = Fake::new(64);
    choose(&mut hand, &mut memory, 2048, now);
    choose(&mut hand, &mut memory, 2048, now + FORGET_EVERY / 2);
    let batches = memory.forgotten.borrow().clone();
    assert_eq!(batches.len(), 1);
    let [range] = batches[0][..] else { panic!("{batches:?}") };
    // No more is forgotten than is soon looked at, even if nothing was looked at before.
    assert_eq!((range.start, range.count), (Gfn(0), 2048 * LOOKS_LEAST as u64));
}

/// There is a pause, however long forgetting takes.
#[test]
fn after_forgetting_there_is_a_pause() {
    let (mut hand, now) = hand(64);
    let mut memory = Fake { forgetting: SECOND, ..Fake::new(64) };
    choose(&mut hand, &mut memory, 64, now);
    for (later, batches) in [(FORGET_EVERY / 2, 1), (FORGET_EVERY, 2)] {
        choose(&mut hand, &mut memory, 4096, now + SECOND + later);
        assert_eq!(memory.forgotten.borrow().len(), batches);
    }
}

/// One of the two windows is used as a whole each time. Of the other, nearly nothing is used.
#[test]
fn forgetting_that_is_of_no_use_becomes_rarer() {
    let (mut hand, mut now) = hand(2);
    let mut memory = Fake::new(2);
    memory.stays = Box::new(|gfn| (WINDOW..2 * WINDOW).contains(&gfn));
    for _ in 0..100 {
        memory.touch(0..WINDOW + 1);
        now += SECOND / 2;
        choose(&mut hand, &mut memory, 64, now);
    }
    let ranges: Vec<FrameRange> = memory.forgotten.take().into_iter().flatten().collect();
    let turns = |gfn| ranges.iter().filter(|range| range.contains(Gfn(gfn))).count();
    let (busy, idle) = (turns(0), turns(WINDOW));
    assert!(busy > 0 && busy * 3 < idle, "{busy}, {idle}");
}

/// A window that becomes empty before the hand arrives is waited for no longer.
#[test]
fn forgetting_goes_on_after_what_was_forgotten_is_evicted() {
    let (mut hand, mut now) = hand(600);
    let mut memory = Fake::new(600);
    let step = |hand: &mut Hand, memory: &mut Fake, want, now| {
        memory.mapped.borrow_mut().copy_from_slice(&memory.resident);
        choose(hand, memory, want, now);
    };
    // Fast steps, so that much is forgotten ahead.
    for _ in 0..1000 {
        if hand.windows.pending() >= 50_000 {
            break;
        }
        now += SECOND / 10;
        step(&mut hand, &mut memory, 4096, now);
    }
    assert!(hand.windows.pending() >= 50_000);
    let ahead = (hand.looks..hand.looks + hand.lead).map(|window| window % 600);
    for window in ahead {
        memory.resident[window * WINDOW as usize..][..WINDOW as usize].fill(false);
    }
    memory.forgotten.take();
    for _ in 0..40 {
        now += SECOND;
        step(&mut hand, &mut memory, 512, now);
    }
    assert!(!memory.forgotten.take().concat().is_empty(), "{} pending", hand.windows.pending());
}

/// A thread of the VMM is stopped meanwhile, so there is no time for more. What was not forgotten
/// does not count as unused for that reason.
#[test]
fn windows_that_are_left_over_are_forgotten_the_next_time() {
    let (mut hand, now) = hand(8);
    let mut memory = Fake { forgets: Some(2 * WINDOW + 7), ..Fake::new(8) };
    // Nothing of the first window has to be forgotten.
    memory.mapped.borrow_mut()[..WINDOW as usize].fill(false);
    choose(&mut hand, &mut memory, 512, now);
    let is_due = [0, 1, 2, 3].map(|index| hand.windows.is_due(index, SECOND, memory.now.get()));
    assert_eq!(is_due, [false, false, false, true]);
}

/// For example, if somebody traces the VMM.
#[test]
fn a_hand_that_cannot_forget_chooses_by_what_it_knows() {
    let (mut hand, now) = hand(1);
    let mut memory = Fake::new(1);
    choose(&mut hand, &mut memory, 1, now);
    memory.touch(0..500);
    memory.forgets = None;
    let mut chosen = choose(&mut hand, &mut memory, 12, now + 3 * SECOND);
    chosen.sort_unstable();
    assert!(chosen.iter().map(|gfn| gfn.0).eq(500..512), "{chosen:?}");
    assert!(hand.take_failure().is_some() && hand.take_failure().is_none());
    // The hand tries again.
    memory.forgets = Some(u64::MAX);
    memory.forgotten.borrow_mut().clear();
    choose(&mut hand, &mut memory, 1, now + 4 * SECOND);
    assert_eq!(memory.forgotten.borrow().len(), 1);
    assert!(hand.take_failure().is_none());
}

/// What the hand reads of the page table to forget is in proportion to what a stop gets to.
#[test]
fn no_more_is_read_than_a_stop_gets_to() {
    let (mut hand, now) = hand(400);
    let mut memory = Fake { forgets: Some(40 * WINDOW), ..Fake::new(400) };
    memory.stays = Box::new(|_| true);
    let mut read = |memory: &mut Fake, step| {
        memory.looks.clear();
        memory.reads.set(0);
        choose(&mut hand, memory, 51_200, now + step * SECOND);
        memory.reads.get() - memory.looks.len()
    };
    assert_eq!(read(&mut memory, 0), 400);
    assert_eq!(read(&mut memory, 1), 80);
    memory.forgets = Some(u64::MAX);
    assert_eq!([2, 3].map(|step| read(&mut memory, step)), [80, 160]);
}

/// Each range is a system call in a stopped thread.
#[test]
fn few_ranges_are_forgotten_at_once() {
    let (mut hand, now) = hand(1000);
    let mut memory = Fake::new(1000);
    for window in (0..1000).step_by(2) {
        memory.mapped.borrow_mut()[window * WINDOW as usize..][..WINDOW as usize].fill(false);
    }
    choose(&mut hand, &mut memory, 64 * FORGET_RANGES * FRAMES_PER_HUGE as usize, now);
    assert_eq!(memory.forgotten.take().concat().len(), FORGET_RANGES);
}

/// Two of three windows are due. The one between them is due soon, or not for a while.
#[test]
fn a_window_that_is_due_soon_is_forgotten_with_those_around_it() {
    for (later, ranges) in [(TURN_AT_REST / 2, 2), (TURN_AT_REST / 5, 1)] {
        let (mut hand, now) = hand(3);
        let memory = Fake::new(3);
        for (index, at) in [(0, now), (1, now + later), (2, now)] {
            hand.windows.end_turn(index, at);
            hand.windows.pass(index);
        }
        memory.now.set(now + TURN_AT_REST);
        let (_, found, _) = hand.due(&memory, TURN_AT_REST, 4096).unwrap();
        assert_eq!(found.len(), ranges, "{found:?}");
    }
}

#[test]
fn more_is_forgotten_and_sooner_if_frames_in_use_must_go() {
    let (at_rest, recent, busy) = (Work::AtRest, Work::Recent, Work::Busy);
    for (takes, windows, turn) in [(at_rest, 1, TURN_AT_REST), (recent, 4, TURN), (busy, 4, TURN)] {
        for (later, forgotten) in [(turn - SECOND / 10, 0), (turn, windows)] {
            let (mut hand, now) = hand(64);
            let mut memory = Fake::new(64);
            for window in 0..64 {
                hand.windows.end_turn(window, now);
                hand.windows.pass(window);
                hand.windows.looked(window, Found { resident: 512, ..Found::default() }, false);
            }
            hand.takes = takes;
            choose(&mut hand, &mut memory, 64, now + later);
            let frames: u64 = memory.forgotten.take().concat().iter().map(|it| it.count).sum();
            assert_eq!(frames, forgotten * WINDOW, "{takes:?}: {later:?}");
        }
    }
}
