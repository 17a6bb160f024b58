//! Tests of when the host is short of memory, and of when a VM is asked.

use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const STALL: u32 = 150;

fn budget(name: &str, total_bytes: u64, available_bytes: u64) -> Budget {
    Budget { name: name.into(), total_bytes, available_bytes }
}

/// A host of 10 GiB.
fn host(available_bytes: u64, stall_permille: u32) -> HostMemory {
    let host = budget("host", 10 * GIB, available_bytes);
    HostMemory { host, groups: Vec::new(), stall_permille: Some(stall_permille) }
}

fn below(below: Below) -> Thresholds {
    Thresholds { below, stall_permille: Some(STALL) }
}

const TENTH: Below = Below::Percent(10);

fn look(pressure: &mut HostPressure, available_bytes: u64, stall_permille: u32) -> Option<String> {
    pressure.look(&host(available_bytes, stall_permille), below(TENTH))
}

#[test]
fn it_ends_a_margin_above_its_beginning() {
    let mut pressure = HostPressure::default();
    assert_eq!(look(&mut pressure, GIB, 41), None);
    let why = look(&mut pressure, 512 * MIB, 41).expect("pressure");
    assert_eq!(why, "host: available 512 MiB below 1 GiB, PSI some 4.1 %");
    let why = look(&mut pressure, 1100 * MIB, 0).expect("the margin is not reached");
    assert_eq!(why, "host: available 1 GiB below 1.1 GiB, PSI some 0 %");
    assert_eq!(look(&mut pressure, 1152 * MIB, 0), None);
    assert_eq!(look(&mut pressure, 1100 * MIB, 0), None);
}

#[test]
fn tasks_that_wait_are_pressure_also_above_the_threshold() {
    let mut pressure = HostPressure::default();
    assert_eq!(look(&mut pressure, 3 * GIB, STALL - 1), None);
    let why = look(&mut pressure, 3 * GIB, STALL).expect("pressure");
    assert_eq!(why, "host: available 3 GiB, PSI some 15 % over 15 %");
    assert!(pressure.is_by_stalls());
    assert!(look(&mut pressure, 3 * GIB, STALL / 2).is_some());
    assert_eq!(look(&mut pressure, 3 * GIB, STALL / 2 - 1), None);
    assert!(!pressure.is_by_stalls());
    assert!(look(&mut pressure, GIB - 1, STALL).is_some() && !pressure.is_by_stalls());
}

#[test]
fn tasks_that_wait_count_only_while_memory_is_not_plentiful() {
    let mut pressure = HostPressure::default();
    assert_eq!(look(&mut pressure, 4 * GIB, 1000), None);
    assert!(look(&mut pressure, 4 * GIB - 1, 1000).is_some());
    // It ends above its beginning.
    assert!(look(&mut pressure, 4 * GIB + 512 * MIB - 1, 1000).is_some());
    assert_eq!(look(&mut pressure, 4 * GIB + 512 * MIB, 1000), None);
    // A control group that is nearly full.
    let group = budget("control group /limited", GIB, 300 * MIB);
    let memory = HostMemory { groups: vec![group], ..host(9 * GIB, STALL) };
    assert!(pressure.look(&memory, below(TENTH)).is_some());
    // Waiting tasks alone are to count.
    let mut pressure = HostPressure::default();
    assert!(pressure.look(&host(10 * GIB, STALL), below(Below::Bytes(0))).is_some());
}

#[test]
fn pressure_of_a_high_threshold_ends_too() {
    for percent in [89, 95, 99] {
        let (mut pressure, high) = (HostPressure::default(), below(Below::Percent(percent)));
        let mut look = |available| pressure.look(&host(available, 0), high);
        assert!(look(GIB).is_some(), "{percent}");
        assert_eq!(look(10 * GIB - 1), None, "{percent}");
    }
}

#[test]
fn a_size_above_a_limit_counts_as_all_of_it() {
    let memory = |available| HostMemory {
        groups: vec![budget("control group /limited", GIB, available)],
        ..host(5 * GIB, 0)
    };
    let two = below(Below::Bytes(2 * GIB));
    let why = HostPressure::default().look(&memory(GIB - 1), two).expect("pressure");
    assert!(why.contains(" below 1 GiB"), "{why}");
    assert_eq!(HostPressure::default().look(&memory(GIB), two), None);
}

#[test]
fn without_psi_available_memory_decides() {
    let mut pressure = HostPressure::default();
    let memory = HostMemory { stall_permille: None, ..host(GIB - 1, 0) };
    let why = pressure.look(&memory, below(TENTH)).expect("pressure");
    assert_eq!(why, "host: available 1023.9 MiB below 1 GiB");
    let ignored = Thresholds { below: Below::Bytes(0), stall_permille: None };
    assert_eq!(HostPressure::default().look(&host(0, 1000), ignored), None);
}

#[test]
fn a_threshold_of_0_never_holds_and_one_of_100_percent_always() {
    for of_nothing in [Below::Percent(0), Below::Bytes(0)] {
        let mut pressure = HostPressure::default();
        assert!(pressure.look(&host(10 * GIB - 1, 0), below(Below::Percent(100))).is_some());
        assert_eq!(pressure.look(&host(0, 0), below(of_nothing)), None);
    }
}

#[test]
fn a_control_group_has_a_threshold_of_its_own() {
    let full = budget("control group /limited", GIB, 50 * MIB);
    let memory = HostMemory { groups: vec![full], ..host(5 * GIB, 0) };
    let why = HostPressure::default().look(&memory, below(TENTH)).expect("pressure");
    assert_eq!(why, "control group /limited: available 50 MiB below 102.3 MiB, PSI some 0 %");
    assert_eq!(memory.to_string(), "host: available 5 GiB, PSI some 0 %");
}

#[test]
fn figures_that_no_host_has_break_nothing() {
    let all = budget("host", u64::MAX, u64::MAX - 1);
    let memory = HostMemory { host: all, groups: Vec::new(), stall_permille: Some(u32::MAX) };
    for below in [Below::Percent(u32::MAX), Below::Bytes(u64::MAX), Below::Percent(100)] {
        let thresholds = Thresholds { below, stall_permille: Some(u32::MAX) };
        let mut pressure = HostPressure::default();
        for _ in 0..2 {
            assert!(pressure.look(&memory, thresholds).is_some());
        }
    }
}

#[test]
fn a_vm_that_had_nothing_to_give_is_asked_less_often() {
    let mut pressure = HostPressure::default();
    let at = Duration::from_secs;
    assert!(pressure.is_due(at(0)));
    pressure.asked(at(0), MIB);
    assert!(!pressure.is_due(Duration::from_millis(999)) && pressure.is_due(at(1)));
    pressure.asked(at(1), 0);
    assert!(!pressure.is_due(at(5)) && pressure.is_due(at(6)));
}

/// What a look can see, with some of it around the marks.
fn a_look() -> impl Strategy<Value = (u64, u32)> {
    let available = prop_oneof![0..2 * GIB, GIB - 2..GIB + 3, 1152 * MIB - 2..1152 * MIB + 3];
    let stall = prop_oneof![0..1001u32, STALL - 2..STALL + 3, STALL / 2 - 2..STALL / 2 + 3];
    (available, stall)
}

proptest! {
    #[test]
    fn between_the_marks_it_stays_as_it_was(
        begins in a_look(),
        looks in prop::collection::vec((GIB..1152 * MIB, STALL / 2..STALL), 1..50),
    ) {
        let mut pressure = HostPressure::default();
        let was_on = look(&mut pressure, begins.0, begins.1).is_some();
        for (available, stall) in looks {
            prop_assert_eq!(look(&mut pressure, available, stall).is_some(), was_on);
        }
    }

    #[test]
    fn it_changes_only_beyond_a_mark(looks in prop::collection::vec(a_look(), 1..100)) {
        let (mut pressure, mut was_on) = (HostPressure::default(), false);
        for (available, stall) in looks {
            let is_on = look(&mut pressure, available, stall).is_some();
            let is_hard = available < GIB || stall >= STALL;
            let is_eased = available >= 1152 * MIB && stall * 2 < STALL;
            prop_assert_eq!(is_on, is_hard || (was_on && !is_eased));
            was_on = is_on;
        }
    }

    #[test]
    fn no_vm_is_asked_twice_in_a_second(
        steps in prop::collection::vec((0..2000u64, any::<bool>()), 1..100),
    ) {
        let (mut pressure, mut now) = (HostPressure::default(), Duration::ZERO);
        let mut last: Option<Duration> = None;
        for (step_ms, gives) in steps {
            now += Duration::from_millis(step_ms);
            if pressure.is_due(now) {
                prop_assert!(last.is_none_or(|last| now - last >= PAUSE));
                pressure.asked(now, u64::from(gives));
                last = Some(now);
            }
        }
    }
}
