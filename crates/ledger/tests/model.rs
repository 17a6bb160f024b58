//! The ledger against a plain map, and over a restart.
#![cfg(not(loom))]

use std::collections::BTreeMap;

use ebb_ledger::{Content, Ledger, Tables, Want};
use ebb_units::{FrameRange, Gfn, HugeFrame};
use proptest::prelude::*;

const HUGE_FRAMES: u64 = 4;
const END: Gfn = Gfn(HUGE_FRAMES * 512);

#[derive(Clone, Debug)]
enum Step {
    Split(u64),
    Set(u64, Content),
    SetFrame(u64, Content),
    Reopen,
}

fn content() -> impl Strategy<Value = Content> {
    prop_oneof![
        Just(Content::Resident),
        any::<(u8, bool)>().prop_map(|(fill, hard)| Content::Empty { fill, hard }),
        (0..1u64 << 48).prop_map(|slot| Content::Saved { slot }),
        (0..1u64 << 48).prop_map(|block| Content::OnDisk { block }),
        Just(Content::Unplugged),
        (0..1u64 << 40, 0..=10u8)
            .prop_map(|(head, order)| Content::Watch { head: Gfn(head), order }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..HUGE_FRAMES).prop_map(Step::Split),
        (0..HUGE_FRAMES, content()).prop_map(|(huge, content)| Step::Set(huge, content)),
        (0..END.0, content()).prop_map(|(gfn, content)| Step::SetFrame(gfn, content)),
        Just(Step::Reopen),
    ]
}

fn runs_of(model: &BTreeMap<u64, Content>) -> Vec<(u64, Content)> {
    model.iter().filter(|(_, c)| **c != Content::Resident).map(|(g, c)| (*g, *c)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn says_what_was_written(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger");
        let mut ledger = Ledger::create(&path, END, Tables::WhenSplit).unwrap();
        let mut model: BTreeMap<u64, Content> = (0..END.0).map(|g| (g, Content::Resident)).collect();
        for step in steps {
            match step {
                Step::Split(huge) => prop_assert!(!ledger.split(HugeFrame(huge)).unwrap()),
                Step::Set(huge, content) => {
                    let frames = FrameRange::huge(HugeFrame(huge));
                    prop_assert!(!ledger.lock(frames).unwrap().unlock(content));
                    frames.frames().for_each(|g| { model.insert(g.0, content); });
                }
                Step::SetFrame(gfn, content) => {
                    match ledger.lock_frame(Gfn(gfn)) {
                        Ok(mut frame) => {
                            prop_assert_eq!(frame.content(), model[&gfn]);
                            prop_assert!(frame.commit(content));
                            prop_assert!(!frame.unlock(content));
                            model.insert(gfn, content);
                        }
                        Err(_) => prop_assert!(!ledger.is_split(Gfn(gfn).huge())),
                    }
                }
                Step::Reopen => {
                    drop(ledger);
                    ledger = Ledger::open(&path, END).unwrap();
                    ledger.recover(|_, _| panic!("nothing was locked"));
                }
            }
        }
        for (gfn, content) in &model {
            prop_assert_eq!(ledger.content(Gfn(*gfn)), *content);
            prop_assert_eq!(ledger.want(Gfn(*gfn)), Want::Free(*content));
        }
        let runs: Vec<(u64, Content)> = ledger
            .runs()
            .flat_map(|(range, content)| range.frames().map(move |g| (g.0, content)))
            .collect();
        prop_assert_eq!(runs, runs_of(&model));
    }
}

#[test]
fn a_mark_makes_the_commit_fail_and_reaches_the_holder() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(&dir.path().join("ledger"), END, Tables::WhenSplit).unwrap();
    assert!(!ledger.split(HugeFrame(0)).unwrap());
    let empty = Content::Empty { fill: 0, hard: false };
    let mut early = ledger.lock_frame(Gfn(3)).unwrap();
    assert_eq!(ledger.want(Gfn(3)), Want::Marked(Content::Resident));
    assert!(!early.commit(empty));
    assert!(early.abandon());
    let mut late = ledger.lock_frame(Gfn(3)).unwrap();
    assert!(late.commit(empty));
    assert_eq!(ledger.want(Gfn(3)), Want::Marked(empty));
    assert!(late.unlock(empty));
    assert_eq!(ledger.want(Gfn(4)), Want::Free(Content::Resident));
}

#[test]
fn a_busy_part_gives_nothing_and_loses_no_mark() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::create(&dir.path().join("ledger"), END, Tables::WhenSplit).unwrap();
    assert!(!ledger.split(HugeFrame(1)).unwrap());
    let held = ledger.lock_frame(Gfn(700)).unwrap();
    assert!(ledger.lock(FrameRange::huge(HugeFrame(1))).is_err());
    assert_eq!(ledger.want(Gfn(600)), Want::Free(Content::Resident));
    assert_eq!(ledger.want(Gfn(700)), Want::Marked(Content::Resident));
    assert!(held.abandon());
    assert!(ledger.lock(FrameRange::huge(HugeFrame(1))).is_ok());
}

#[test]
fn frames_that_a_dead_daemon_locked_are_reported_and_unlocked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let ledger = Ledger::create(&path, END, Tables::WhenSplit).unwrap();
    assert!(!ledger.split(HugeFrame(2)).unwrap());
    let watch = Content::Watch { head: Gfn(512), order: 9 };
    let mut frame = ledger.lock_frame(Gfn(1030)).unwrap();
    assert!(frame.commit(watch));
    std::mem::forget(frame);
    std::mem::forget(ledger.lock(FrameRange::huge(HugeFrame(0))).unwrap());
    drop(ledger);
    let mut ledger = Ledger::open(&path, END).unwrap();
    let mut locked = Vec::new();
    ledger.recover(|frames, content| locked.push((frames, content)));
    let huge = (FrameRange::huge(HugeFrame(0)), Content::Resident);
    assert_eq!(locked, [huge, (FrameRange::new(Gfn(1030), 1), watch)]);
    assert!(ledger.lock(FrameRange::huge(HugeFrame(0))).is_ok());
}

#[test]
fn a_file_that_is_no_ledger_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    std::fs::write(&path, [7; 65536]).unwrap();
    assert!(Ledger::open(&path, END).is_err());
    Ledger::create(&path, END, Tables::WhenSplit).unwrap();
    assert!(Ledger::open(&path, Gfn(END.0 * 2)).is_err());
    assert!(Ledger::open(&path, END).is_ok());
}
