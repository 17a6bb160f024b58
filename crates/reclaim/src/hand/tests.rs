use super::ahead::{FORGET_EVERY, FORGET_RANGES};
use super::fake::{Fake, WINDOW};
use super::windows::RIPE;
use super::*;
use crate::cost::Page;

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
fn what_is_used_after_it_was_forgotten_stays() {
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
fn what_had_no_time_to_be_used_again_counts_as_used() {
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
    memory.there[..2 * WINDOW as usize].fill(false);
    memory.there[30 * WINDOW as usize..33 * WINDOW as usize].fill(false);
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
    memory.there.fill(false);
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
fn what_rests_is_found_further_on() {
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

#[test]
fn what_somebody_else_forgets_was_seen() {
    let (mut hand, now) = hand(1);
    let mut memory = Fake::new(1);
    hand.saw_mapped(FrameRange::new(Gfn(0), 500));
    hand.is_emptied(now);
    memory.mapped.borrow_mut().fill(false);
    memory.touch(0..100);
    let chosen = choose(&mut hand, &mut memory, 12, now + SECOND);
    assert!(chosen.iter().all(|gfn| gfn.0 >= 500), "{chosen:?}");
    // A turn began when the page table was emptied.
    assert_eq!(memory.forgotten.take().concat(), []);
}

/// Page cache that comes back is no more in use than page cache that came for the first time. Other
/// memory that comes back is as much in use as memory that was used all the time.
#[test]
fn what_comes_back_soon_was_at_work() {
    for (kind, goes) in [(PageKind::File, 300), (PageKind::Anonymous, 0)] {
        let (mut hand, now) = hand(1);
        let mut memory = Fake { kind, ..Fake::new(1) };
        memory.stays = Box::new(|gfn| (0..300).contains(&gfn));
        let chosen = choose(&mut hand, &mut memory, 1, now);
        assert_eq!(chosen, [Gfn(300)]);
        memory.evict(&chosen);
        memory.there[300] = true;
        memory.touch(0..512);
        memory.stays = Box::new(|_| false);
        assert_eq!(choose(&mut hand, &mut memory, 1, now + SECOND), [Gfn(goes)], "{kind:?}");
    }
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
fn where_it_is_of_no_use_forgetting_is_rarer() {
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

#[test]
fn units_go_whole_or_not_at_all() {
    let now = Instant::now();
    let mut hand = Hand::new(Gfn(4 * WINDOW));
    let mut memory = Fake::new(4);
    memory.piece = Piece::Whole;
    memory.mapped.borrow_mut().fill(false);
    memory.touch(5..6);
    memory.there[600] = false;
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
fn what_rests_goes_whole_and_what_is_at_work_is_broken_up() {
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
    let rests = windows[0].0 * WINDOW + 7;
    let first = (0..6).map(|_| {
        now += 3 * SECOND;
        (0..3).for_each(|window| used_as_a_whole(&memory, window));
        memory.mapped.borrow_mut()[rests as usize] = false;
        choose(&mut hand, &mut memory, 64, now).first().copied()
    });
    assert!(first.collect::<Vec<_>>().contains(&Some(Gfn(rests))));
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
fn what_was_at_work_and_is_used_no_more_goes_whole() {
    let (mut hand, mut memory, now) = hand_over_huge_pages(4);
    for _ in 0..2 {
        hand.windows.see(FrameRange::huge(HugeFrame(3)));
        hand.windows.end_turn(3, now - SECOND);
        hand.windows.pass(3);
    }
    let uses = hand.windows.uses(HugeFrame(3).first(), true);
    let page = Page { kind: Some(PageKind::Anonymous), ..Page::default() };
    assert!(page.cost(uses).unwrap().work > Work::Rests, "{uses:?}");
    (0..3).for_each(|window| used_as_a_whole(&memory, window));
    let chosen = choose(&mut hand, &mut memory, 512, now);
    assert!(chosen.iter().all(|gfn| gfn.huge().0 == 3) && chosen.len() == 512);
    assert_eq!(memory.broken.borrow().as_deref(), Some(&[][..]));
}

/// For example, if a device uses one of its frames.
#[test]
fn what_rests_but_for_a_part_that_stays_is_broken_up() {
    let (mut hand, mut memory, now) = hand_over_huge_pages(1);
    memory.stays = Box::new(|gfn| gfn == 7);
    let mut gone = choose(&mut hand, &mut memory, 512, now);
    assert_eq!(memory.broken.borrow().as_deref(), Some(&[HugeFrame(0)][..]));
    gone.sort_unstable();
    // This much of it is likely to be evicted.
    assert!(gone.iter().map(|gfn| gfn.0).eq((0..129).filter(|gfn| *gfn != 7)), "{gone:?}");
}

#[test]
fn what_stays_as_a_whole_is_not_broken_up() {
    let (mut hand, mut memory, now) = hand_over_huge_pages(2);
    used_as_a_whole(&memory, 0);
    memory.stays = Box::new(|gfn| gfn < WINDOW);
    assert_eq!(choose(&mut hand, &mut memory, 600, now).len(), WINDOW as usize);
    assert_eq!(memory.broken.borrow().as_deref(), Some(&[][..]));
}

#[test]
fn what_cannot_be_broken_up_goes_whole() {
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

#[test]
fn what_is_at_work_and_what_the_kernel_has_is_counted() {
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

/// A window that becomes empty before the hand arrives is waited for no longer.
#[test]
fn forgetting_goes_on_after_what_was_forgotten_is_gone() {
    let (mut hand, mut now) = hand(600);
    let mut memory = Fake::new(600);
    let step = |hand: &mut Hand, memory: &mut Fake, want, now| {
        memory.mapped.borrow_mut().copy_from_slice(&memory.there);
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
        memory.there[window * WINDOW as usize..][..WINDOW as usize].fill(false);
    }
    memory.forgotten.take();
    for _ in 0..40 {
        now += SECOND;
        step(&mut hand, &mut memory, 512, now);
    }
    assert!(!memory.forgotten.take().concat().is_empty(), "{} pending", hand.windows.pending());
}

/// Memory that was returned is in use by nobody, not even by the kernel.
#[test]
fn what_is_gone_is_not_at_work_for_good() {
    let (mut hand, mut now) = hand(16);
    let mut memory = Fake::new(16);
    memory.kernel = 0..16 * WINDOW;
    let mut turn = |hand: &mut Hand, memory: &mut Fake, seconds: u32| {
        for _ in 0..seconds {
            memory.mapped.borrow_mut().copy_from_slice(&memory.there);
            now += SECOND;
            choose(hand, memory, 64, now);
        }
        (hand.active_frames(), hand.kernel_frames())
    };
    assert_eq!(turn(&mut hand, &mut memory, 20), (Some(16 * WINDOW), 16 * WINDOW));
    memory.there[WINDOW as usize..].fill(false);
    // What was evicted counts as in use for a while. Of the kernel's memory, only what is resident
    // counts.
    assert_eq!(turn(&mut hand, &mut memory, 4), (Some(16 * WINDOW), WINDOW));
    assert_eq!(turn(&mut hand, &mut memory, 60), (Some(WINDOW), WINDOW));
}

/// Frames at rest that must stay are no choice: the hand looks further for others.
#[test]
fn what_rests_and_stays_does_not_end_the_search() {
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
fn what_comes_back_late_is_used_once() {
    for (seconds, is_due, is_at_work) in
        [(4, false, true), (4, true, true), (60, false, false), (60, true, false)]
    {
        let (mut hand, now) = hand(2);
        let mut memory = Fake::new(2);
        choose(&mut hand, &mut memory, 1024, now);
        let frames: Vec<Gfn> = (0..WINDOW).map(Gfn).collect();
        memory.evict(&frames);
        let now = now + seconds * SECOND;
        memory.there.fill(true);
        memory.mapped.borrow_mut().fill(true);
        // Its turn goes on: nothing is due to be forgotten, or the stop does not get there.
        hand.forgot_at = Some(now).filter(|_| !is_due);
        memory.forgets = Some(0);
        choose(&mut hand, &mut memory, 1, now);
        let uses = hand.windows.uses(Gfn(1), true);
        assert_eq!(uses.is_often(), is_at_work, "{seconds}: {uses:?}");
    }
}

/// A thread of the VMM is stopped meanwhile, so there is no time for more. What was not forgotten
/// does not count as unused for that reason.
#[test]
fn what_is_not_forgotten_at_once_is_the_next_time() {
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
fn where_nothing_can_be_forgotten_it_is_chosen_by_what_is_known() {
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
fn what_is_due_soon_is_forgotten_in_a_row_with_what_is_due() {
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
fn where_what_is_in_use_has_to_go_more_is_forgotten_and_sooner() {
    let (rests, recent, busy) = (Work::Rests, Work::Recent, Work::Busy);
    for (takes, windows, turn) in [(rests, 1, TURN_AT_REST), (recent, 4, TURN), (busy, 4, TURN)] {
        for (later, forgotten) in [(turn - SECOND / 10, 0), (turn, windows)] {
            let (mut hand, now) = hand(64);
            let mut memory = Fake::new(64);
            for window in 0..64 {
                hand.windows.end_turn(window, now);
                hand.windows.pass(window);
                hand.windows.looked(window, Found { there: 512, ..Found::default() }, false);
            }
            hand.takes = takes;
            choose(&mut hand, &mut memory, 64, now + later);
            let frames: u64 = memory.forgotten.take().concat().iter().map(|it| it.count).sum();
            assert_eq!(frames, forgotten * WINDOW, "{takes:?}: {later:?}");
        }
    }
}
