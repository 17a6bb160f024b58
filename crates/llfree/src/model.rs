//! Runs pairs of operations concurrently, in every order that the checker tries: no frame is lost,
//! none is got twice, and the host reclaims nothing that is in use.
//!
//! The zone has one tree of two areas. The first area is in parts: some frames are allocated, and a
//! slot has claimed some. The second is whole: free, allocated, or without memory. All threads
//! share the slots.

mod leaving;
mod shared;
mod words;

use std::vec::Vec;

use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;

use self::shared::{Done, Shared, Start, Step, WHOLE_FRAME};

/// Runs every order of the threads with at most `preemptions` preemptions.
fn run(preemptions: usize, all: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(all);
}

fn all_at_once(start: Start, steps: &[Step], preemptions: usize) {
    let steps = steps.to_vec();
    run(preemptions, move || {
        let shared = Arc::new(Shared::new());
        shared.start(start);
        let threads: Vec<_> = steps
            .iter()
            .map(|&step| {
                let shared = shared.clone();
                thread::spawn(move || shared.run(step))
            })
            .collect();
        let done: Vec<Done> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        shared.check(&done, start);
        for (step, done) in steps.iter().zip(&done) {
            // There is enough for two small blocks, whatever else happens.
            if matches!(step, Step::Get(0..=3)) {
                assert_ne!(*done, Done::Nothing, "{step:?} found nothing");
            }
        }
    });
}

/// Preemptions that are tried for each pair. Two take minutes.
fn usual_preemptions() -> usize {
    if std::env::var_os("EBB_LONG").is_some() { 2 } else { 1 }
}

fn each_pair(start: Start, steps: &[Step]) {
    let most = usual_preemptions();
    for (index, &first) in steps.iter().enumerate() {
        for &second in &steps[index..] {
            // Two searches through everything have too many orders.
            let both_search = matches!((first, second), (Step::Get(_), Step::Get(_)));
            all_at_once(start, &[first, second], if both_search { 1 } else { most });
        }
    }
}

const GUEST: [Step; 9] = [
    Step::Get(0),
    Step::Get(3),
    Step::Get(8),
    Step::Get(9),
    Step::GetAt(7, 0),
    Step::Put(0, 0),
    Step::Put(64, 3),
    Step::Put(128, 7),
    Step::Drain,
];

fn guest_and(more: &[Step]) -> Vec<Step> {
    GUEST.iter().chain(more).copied().collect()
}

#[test]
fn with_a_free_area() {
    use Step::{Get, GetAt, HardReclaim, SoftReclaim};
    let more =
        [Get(10), GetAt(WHOLE_FRAME, 9), GetAt(WHOLE_FRAME + 9, 0), HardReclaim, SoftReclaim];
    each_pair(Start::Free, &guest_and(&more));
}

#[test]
fn with_an_area_taken_whole() {
    use Step::{HardReclaim, Put, SoftReclaim};
    let more = [
        Put(WHOLE_FRAME, 9),
        Put(WHOLE_FRAME, 0),
        Put(WHOLE_FRAME + 5, 0),
        HardReclaim,
        SoftReclaim,
    ];
    each_pair(Start::Taken, &guest_and(&more));
}

#[test]
fn with_an_area_without_memory() {
    use Step::{GetAt, HardReclaim, Put, Recover, SoftReclaim};
    let more = [
        Recover,
        GetAt(WHOLE_FRAME, 9),
        GetAt(WHOLE_FRAME + 9, 0),
        GetAt(WHOLE_FRAME + 72, 3),
        Put(WHOLE_FRAME, 9),
        HardReclaim,
        SoftReclaim,
    ];
    each_pair(Start::Soft, &guest_and(&more));
}

#[test]
fn with_an_area_that_the_host_has() {
    use Step::{GetAt, Put, Return};
    let more = [GetAt(WHOLE_FRAME, 9), Put(WHOLE_FRAME, 9), Put(WHOLE_FRAME + 5, 0), Return];
    each_pair(Start::Hard, &guest_and(&more));
}

#[test]
fn with_claims_on_an_area() {
    use Step::{Drain, Get, GetAt, HardReclaim, SoftReclaim};
    let steps = [
        Get(0),
        Get(3),
        Get(9),
        GetAt(WHOLE_FRAME, 9),
        GetAt(WHOLE_FRAME, 0),
        Drain,
        HardReclaim,
        SoftReclaim,
    ];
    each_pair(Start::Claimed, &steps);
}

/// Two gets of order 0 fill the slot at the same time.
#[test]
fn with_a_slot_without_claims() {
    use Step::{Drain, Get, GetAt, Put, SoftReclaim};
    let steps = [Get(0), Get(3), Get(8), Get(9), GetAt(7, 0), Put(0, 0), Drain, SoftReclaim];
    each_pair(Start::Spent, &steps);
}

/// Two puts of overlapping blocks of several rows break the rules. One of them gets an error, and
/// the words agree.
#[test]
fn overlapping_puts() {
    for first in [(WHOLE_FRAME, 9), (WHOLE_FRAME + 256, 8)] {
        for second in [(WHOLE_FRAME + 256, 8), (WHOLE_FRAME + 384, 7), (WHOLE_FRAME + 448, 6)] {
            run(2, move || {
                let shared = Arc::new(Shared::new());
                shared.start(Start::Taken);
                let threads = [first, second].map(|(frame, order)| {
                    let shared = shared.clone();
                    thread::spawn(move || shared.run(Step::Put(frame, order)))
                });
                let done = threads.map(|thread| thread.join().unwrap());
                assert!(done.contains(&Done::Nothing), "both of {first:?} and {second:?}");
                shared.zone().verify().unwrap();
            });
        }
    }
}

/// Three threads at once: the host takes an area and returns it, while two threads of the guest
/// get, touch and put its frames.
#[test]
fn the_host_between_two_guests() {
    use Step::{Get, GetAt, HardReclaim, Put, Recover, Return, SoftReclaim};
    for start in [Start::Free, Start::Soft] {
        all_at_once(start, &[SoftReclaim, GetAt(WHOLE_FRAME, 9), GetAt(WHOLE_FRAME + 1, 0)], 2);
        all_at_once(start, &[SoftReclaim, Get(9), HardReclaim], 1);
    }
    all_at_once(Start::Soft, &[Recover, GetAt(WHOLE_FRAME, 9), GetAt(WHOLE_FRAME + 1, 0)], 2);
    all_at_once(Start::Taken, &[SoftReclaim, Put(WHOLE_FRAME, 9), GetAt(WHOLE_FRAME, 9)], 2);
    all_at_once(Start::Taken, &[Put(WHOLE_FRAME, 0), Put(WHOLE_FRAME + 1, 0), Get(9)], 1);
    all_at_once(Start::Hard, &[Return, Get(9), HardReclaim], 1);
}
