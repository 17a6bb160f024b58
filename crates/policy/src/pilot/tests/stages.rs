//! The host's stage.

use super::*;
use crate::pilot::stage::StageWatch;

fn look(watch: &mut StageWatch, seconds: u64, available_mib: u64) -> Stage {
    watch.look(Duration::from_secs(seconds), RULE, &memory(available_mib))
}

#[test]
fn a_worse_stage_begins_at_once() {
    let mut watch = StageWatch::default();
    let stages = [2048, 2047, 1024, 1023, 512, 511].map(|available| look(&mut watch, 0, available));
    use Stage::{Ample, Critical, Short, Tight};
    assert_eq!(stages, [Ample, Tight, Tight, Short, Short, Critical]);
}

#[test]
fn a_better_stage_begins_later_and_one_by_one() {
    let mut watch = StageWatch::default();
    assert_eq!(look(&mut watch, 0, 100), Stage::Critical);
    assert_eq!(look(&mut watch, 1, 9000), Stage::Critical);
    assert_eq!(look(&mut watch, 10, 9000), Stage::Critical);
    assert_eq!(look(&mut watch, 11, 9000), Stage::Short);
    assert_eq!(look(&mut watch, 20, 9000), Stage::Short);
    assert_eq!(look(&mut watch, 21, 9000), Stage::Tight);
    // It was worse in between, so the time begins anew.
    assert_eq!(look(&mut watch, 30, 2100), Stage::Tight);
    assert_eq!(look(&mut watch, 31, 9000), Stage::Tight);
    assert_eq!(look(&mut watch, 40, 9000), Stage::Tight);
    assert_eq!(look(&mut watch, 41, 9000), Stage::Ample);
}

#[test]
fn a_little_more_than_a_border_is_not_better() {
    let mut watch = StageWatch::default();
    look(&mut watch, 0, 2000);
    assert_eq!(look(&mut watch, 100, 2303), Stage::Tight);
    assert_eq!(look(&mut watch, 101, 2304), Stage::Tight);
    assert_eq!(look(&mut watch, 111, 2304), Stage::Ample);
}

#[test]
fn tasks_that_wait_count_if_memory_is_near_the_reserve() {
    let stage = |stall_permille, available_mib| {
        let host = HostMemory { stall_permille, ..memory(available_mib) };
        StageWatch::default().look(Duration::ZERO, RULE, &host)
    };
    assert_eq!(stage(Some(150), 4095), Stage::Short);
    assert_eq!(stage(Some(149), 4095), Stage::Ample);
    assert_eq!(stage(Some(1000), 4096), Stage::Ample);
    assert_eq!(stage(None, 4095), Stage::Ample);
}

#[test]
fn the_tightest_control_group_counts() {
    let group = |available_mib: u64| Budget {
        name: "ebb".into(),
        total_bytes: 4096 * MIB,
        available_bytes: available_mib * MIB,
    };
    let host = |available_mib| HostMemory { groups: vec![group(available_mib)], ..memory(9000) };
    let rule = HostRule { reserve: Below::Percent(10), ..RULE };
    let stage =
        |available_mib| StageWatch::default().look(Duration::ZERO, rule, &host(available_mib));
    assert_eq!(
        [900, 800, 400, 200].map(stage),
        [Stage::Ample, Stage::Tight, Stage::Short, Stage::Critical]
    );
}
