//! The consistency rule, against a simple reference: *before a block of a disk changes, no frame is
//! backed by it.*
//!
//! A guest reads and writes its memory, its disk moves blocks, frames in use are evicted and come
//! back. The daemon is killed, while idle or in the middle of any of that, and followed by another.
//! The VM is killed with it, and only the disk stays. After each step every byte of memory and disk
//! is what the reference says, wherever it is, and no frame is backed by a block with another
//! content.
//!
//! The userfaultfd, the RAM file, the ledger, the pager with its threads, the swap file and the
//! hashes are real. The disk is an array, and the guest a thread of the test.
//!
//! `EBB_SEED=N` repeats a run; a failure is shrunk, and printed with its seed.

mod daemon;
mod disk;
mod fuse;
mod play;

use std::time::{SystemTime, UNIX_EPOCH};

use ebb_pager::testing::available;
use ebb_pager::{Grain, Zeros};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use daemon::Broken;
use disk::BLOCKS;
use play::{Action, Crash, FRAMES, Step, play};

const CASES: u32 = 40;
const HUGE_CASES: u32 = 20;
/// Enough cases for each broken rule to be found.
const CONTROL_CASES: u32 = 200;
const STEPS: std::ops::Range<usize> = 10..40;
const SHRINKS_MAX: u32 = 100;

fn action() -> impl Strategy<Value = Action> {
    let run =
        |end: u64| (0..end).prop_flat_map(move |first| (Just(first), 1..=(end - first).min(4)));
    let both = || {
        (0..FRAMES, 0..BLOCKS).prop_flat_map(|(gfn, block)| {
            let most = (FRAMES - gfn).min(BLOCKS - block).min(4);
            (Just(gfn), Just(block), 1..=most)
        })
    };
    prop_oneof![
        3 => (0..FRAMES, 0..8u64).prop_map(|(gfn, seed)| Action::Write { gfn, seed }),
        2 => (0..FRAMES).prop_map(|gfn| Action::Read { gfn }),
        3 => both().prop_map(|(gfn, block, count)| Action::DiskRead { block, gfn, count }),
        3 => both().prop_map(|(gfn, block, count)| Action::DiskWrite { gfn, block, count }),
        1 => run(BLOCKS).prop_map(|(block, count)| Action::Discard { block, count }),
        5 => (0..FRAMES).prop_flat_map(|gfn| (Just(gfn), 1..=FRAMES - gfn))
            .prop_map(|(gfn, count)| Action::Evict { gfn, count }),
        1 => (0..FRAMES).prop_map(|gfn| Action::Punch { gfn }),
        1 => (1..4u64).prop_map(|most| Action::GiveUp { most }),
        1 => prop_oneof![Just(Zeros::Fill), Just(Zeros::Leave)].prop_map(Action::GiveBack),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let crash = prop_oneof![
        14 => Just(None),
        2 => (1..9i64).prop_map(|points| Some(Crash { points, vmm: false })),
        1 => (1..9i64).prop_map(|points| Some(Crash { points, vmm: true })),
    ];
    (action(), crash, prop::bool::weighted(0.25)).prop_map(|(action, crash, evict_beside)| Step {
        action,
        crash,
        evict_beside,
    })
}

fn run(grain: Grain, broken: Broken, cases: u32, seed: u64) -> Result<(), TestError<Vec<Step>>> {
    println!("EBB_SEED={seed}");
    allow_many_files();
    let config = Config {
        cases,
        max_shrink_iters: SHRINKS_MAX,
        failure_persistence: None,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let steps = prop::collection::vec(step(), STEPS);
    TestRunner::new_with_rng(config, rng).run(&steps, |steps| play(&steps, grain, broken))
}

/// Raises the limit of open files: a killed daemon takes its descriptors with it, but here they
/// stay.
fn allow_many_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

fn seed() -> u64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    std::env::var("EBB_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(now)
}

#[test]
fn no_frame_is_backed_by_a_block_that_changed() {
    testkit::require!(available());
    holds(Grain::Frame, CASES);
}

/// The memory of one huge page may be evicted frame by frame.
#[test]
fn no_frame_is_backed_by_a_block_that_changed_in_huge_pages() {
    testkit::require!(available());
    let setting = testkit::HostSetting::shared_huge_pages();
    testkit::require!(setting.as_ref());
    holds(Grain::Huge, HUGE_CASES);
}

fn holds(grain: Grain, cases: u32) {
    match run(grain, Broken::Nothing, cases, seed()) {
        Ok(()) => {}
        Err(TestError::Fail(why, steps)) => panic!("{why}, in {steps:?}"),
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}

/// The control: each rule, when it is left out, is missed.
#[test]
fn a_broken_rule_is_found() {
    testkit::require!(available());
    for broken in [Broken::Vacate, Broken::Forget, Broken::Pin] {
        match run(Grain::Frame, broken, CONTROL_CASES, 1) {
            Err(TestError::Fail(why, steps)) => {
                println!("{broken:?}: {why}, after {} steps: {steps:?}", steps.len());
            }
            result => panic!("{broken:?}: {result:?}"),
        }
    }
}
