//! Tests of monitorings that cannot begin.

use super::*;
use crate::model::share::Share;
use crate::vm::context::machine;

const LONG: Duration = Duration::from_secs(20);

/// Runs one window of a monitoring whose first round fails, as on a host without PAGEMAP_SCAN,
/// with idle page tracking and without.
#[test]
fn a_monitoring_that_cannot_begin_is_given_up() {
    let Some((mut cx, _run)) = machine::context() else { return };
    // The pool has it monitored again and again.
    let share = Share { bytes: 1 << 20, lower_percent: 75, upper_percent: 125 };
    cx.record.note(|record| record.share = Some(share));
    let (window, period) = (Duration::from_millis(1), LONG);
    let mut monitor =
        Monitor::new(ScheduleSettings { window, rounds: 1, period, ..ScheduleSettings::default() });
    monitor.begin().expect("settings that hold together");
    let mut before_forgetting = |_: &_| Err(io::ErrorKind::Unsupported.into());
    let mut lent =
        Lent { is_trusted: false, before_forgetting: &mut before_forgetting, is_placed: false };
    let (is_over, _) = monitor.tick(&mut cx, &mut lent);
    assert!(!is_over && monitor.run.is_none());
    assert!(monitor.report().failed.is_some_and(|why| why.contains("cannot be watched")));
    // The schedule is told of it at its end.
    let began = Instant::now();
    while !monitor.tick(&mut cx, &mut lent).0 {
        assert!(began.elapsed() < LONG, "it is never over");
        std::thread::yield_now();
    }
    assert!(monitor.end(&cx).is_none());
}
