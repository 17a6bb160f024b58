//! Tests of which slots are in use: one step after the other, and by several threads at once.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::SeqCst;

#[derive(Clone, Debug)]
enum Step {
    Take(u64),
    TakeThis(u64),
    Release(usize),
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..300u64).prop_map(Step::Take),
        (0..1500u64).prop_map(Step::TakeThis),
        any::<usize>().prop_map(Step::Release),
        any::<usize>().prop_map(Step::Release),
        Just(Step::Trim),
    ]
}

fn stale(slots: &Clusters) -> Vec<(u64, u64)> {
    let mut runs = Vec::new();
    let visit = |first, count| {
        assert!((first..first + count).all(|slot| slots.is_taken(slot)));
        runs.push((first, count));
        Ok::<(), ()>(())
    };
    slots.take_stale(visit, || true).unwrap();
    runs
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn hands_out_each_slot_once(
        count in 1..1400u64,
        steps in prop::collection::vec(step(), 1..400),
    ) {
        let slots = Clusters::new(count);
        let (mut used, mut released) = (BTreeSet::new(), BTreeSet::new());
        for step in steps {
            match step {
                Step::Take(most) => match slots.take_run(most) {
                    Some((first, got)) => {
                        prop_assert!((1..=most).contains(&got) && first + got <= count);
                        prop_assert_eq!(first / 256, (first + got - 1) / 256);
                        for slot in first..first + got {
                            prop_assert!(used.insert(slot));
                        }
                    }
                    None => prop_assert_eq!(used.len() as u64, count),
                },
                Step::TakeThis(slot) => {
                    let free = slot < count && used.insert(slot);
                    prop_assert_eq!(slots.take_this(slot), free);
                }
                Step::Release(which) if !used.is_empty() => {
                    let slot = *used.iter().nth(which % used.len()).unwrap();
                    slots.release(slot);
                    slots.release(slot);
                    used.remove(&slot);
                    released.insert(slot);
                }
                Step::Release(_) => {}
                Step::Trim => {
                    let trimmed: BTreeSet<u64> =
                        stale(&slots).iter().flat_map(|&(at, n)| at..at + n).collect();
                    let expected: BTreeSet<u64> = released.difference(&used).copied().collect();
                    prop_assert_eq!(trimmed, expected);
                    released.clear();
                }
            }
            prop_assert!((0..count).all(|slot| slots.is_taken(slot) == used.contains(&slot)));
            prop_assert_eq!(slots.used(), used.len() as u64);
        }
    }
}

#[test]
fn neighbours_in_time_are_neighbours_on_disk() {
    let slots = Clusters::new(1024);
    assert_eq!(slots.take_run(200), Some((0, 200)));
    assert_eq!(slots.take_run(200), Some((200, 56)));
    assert_eq!(slots.take_run(1), Some((256, 1)));
    // Released before the cursor: the rest of the cluster comes first.
    slots.release(256);
    assert_eq!(slots.take_run(300), Some((257, 255)));
    assert_eq!(slots.take_run(300), Some((512, 256)));
    // A wholly free cluster comes before one with some free slots.
    (0..10).for_each(|slot| slots.release(slot));
    assert_eq!(slots.take_run(300), Some((768, 256)));
    // The emptiest come first.
    (600..700).for_each(|slot| slots.release(slot));
    assert_eq!(slots.take_run(300), Some((600, 100)));
    assert_eq!(slots.take_run(300), Some((0, 10)));
    assert_eq!(slots.take_run(300), Some((256, 1)));
    assert_eq!(slots.take_run(300), None);
}

#[test]
fn released_slots_are_visited_once_in_runs() {
    let slots = Clusters::new(300);
    (0..300).for_each(|slot| assert!(slots.take_this(slot)));
    [3, 4, 5, 63, 64, 255, 256].into_iter().for_each(|slot| slots.release(slot));
    assert!(slots.take_this(4));
    assert_eq!(stale(&slots), [(3, 1), (5, 1), (63, 2), (255, 1), (256, 1)]);
    assert_eq!(stale(&slots), []);
    slots.release(100);
    assert_eq!(slots.take_stale(|_, _| Err(()), || true), Err(()));
    assert_eq!(stale(&slots), [(100, 1)]);
    assert_eq!(slots.take_run(1), Some((3, 1)));
}

/// Slots are released as fast as they are trimmed.
#[test]
fn trimming_ends_on_request() {
    let slots = Clusters::new(600);
    (0..600).for_each(|slot| assert!(slots.take_this(slot)));
    [3, 5, 9, 300].into_iter().for_each(|slot| slots.release(slot));
    let mut seen = Vec::new();
    for end in [1, 3, 9] {
        let (visited, mut now) = (std::cell::Cell::new(seen.len()), Vec::new());
        let visit = |first, _| {
            now.push(first);
            visited.set(visited.get() + 1);
            // Another slot of the same cluster.
            slots.release(20 + first);
            Ok::<(), ()>(())
        };
        slots.take_stale(visit, || visited.get() < end).unwrap();
        seen.extend(now);
    }
    assert_eq!(seen, [3, 5, 9, 23, 25, 29, 43, 45, 49]);
    assert_eq!(stale(&slots), [(63, 1), (65, 1), (69, 1), (300, 1)]);
}

#[test]
fn threads_share_no_slot() {
    const COUNT: u64 = 700;
    let slots = Clusters::new(COUNT);
    let owners: Vec<AtomicU64> = (0..COUNT).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for me in 1..=4u64 {
            let (slots, owners) = (&slots, &owners);
            scope.spawn(move || {
                for round in 0..4_000 {
                    if round % 512 == 0 {
                        stale(slots);
                    }
                    let Some((first, count)) = slots.take_run(1 + (round * me) % 40) else {
                        continue;
                    };
                    for slot in first..first + count {
                        assert_eq!(owners[slot as usize].swap(me, SeqCst), 0);
                    }
                    for slot in first..first + count {
                        owners[slot as usize].store(0, SeqCst);
                        slots.release(slot);
                    }
                }
            });
        }
    });
    assert_eq!(slots.used(), 0);
    let mut all = BTreeSet::new();
    while let Some((first, count)) = slots.take_run(256) {
        all.extend(first..first + count);
    }
    assert_eq!(all.len() as u64, COUNT);
}
