//! Intermittent monitoring (vTMM, section 3.2.3): when to begin a monitoring, when to look, and
//! when to leave one out because memory already lies right.
//!
//! It knows no clock: its caller gives it the time.

use std::time::Duration;

use crate::WINDOWS_MAX;

/// How often to monitor, and for how long. The defaults are the paper's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScheduleSettings {
    /// Time from one look to the next.
    pub window: Duration,
    /// Number of windows in a monitoring.
    pub rounds: u8,
    /// Time from the beginning of one monitoring to that of the next.
    pub period: Duration,
    /// A monitoring after which fewer bytes than this are moved is quiet.
    pub quiet_bytes: u64,
    /// Most quiet monitorings in a row that count, and so most periods to leave out in a row.
    pub quiet_max: u8,
}

/// Why settings do not fit together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadSchedule {
    /// There is no window, there are too many, or a window is too short.
    #[error("a monitoring needs 1 to {WINDOWS_MAX} windows of at least a millisecond")]
    Windows,
    /// The next monitoring would begin before the last one ends.
    #[error("{rounds} windows of {window:?} do not fit into a period of {period:?}")]
    Period {
        /// Number of windows in a monitoring.
        rounds: u8,
        /// Length of a window.
        window: Duration,
        /// Length of the period.
        period: Duration,
    },
}

impl Default for ScheduleSettings {
    fn default() -> ScheduleSettings {
        ScheduleSettings {
            window: Duration::from_millis(600),
            rounds: 8,
            period: Duration::from_secs(60),
            quiet_bytes: 256 << 20,
            quiet_max: 3,
        }
    }
}

impl ScheduleSettings {
    /// Settings for a VM whose memory is in huge pages: a monitoring every two minutes.
    pub fn huge() -> ScheduleSettings {
        ScheduleSettings { period: Duration::from_secs(120), ..ScheduleSettings::default() }
    }

    /// Longest time from the beginning of one monitoring to that of the next.
    pub fn rarest(&self) -> Duration {
        self.period.saturating_mul(1 + u32::from(self.quiet_max))
    }

    /// Checks that the settings fit together.
    ///
    /// # Errors
    /// [`BadSchedule`].
    pub fn check(&self) -> Result<(), BadSchedule> {
        let ScheduleSettings { window, rounds, period, .. } = *self;
        if !(1..=WINDOWS_MAX).contains(&rounds) || window < Duration::from_millis(1) {
            return Err(BadSchedule::Windows);
        }
        match window.checked_mul(u32::from(rounds)) {
            Some(all) if all <= period => Ok(()),
            _ => Err(BadSchedule::Period { rounds, window, period }),
        }
    }
}

/// What to do now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Nothing before this time.
    Wait(Duration),
    /// Begin a monitoring: a round that clears all.
    Begin,
    /// A window has ended: do a round.
    Look,
    /// The last window has ended: do a round, sort, and move. Then tell [`Schedule::moved`] how
    /// much was moved.
    Last,
}

/// When to monitor one VM. Times count from any instant that its owner chooses.
#[derive(Clone, Debug)]
pub struct Schedule {
    settings: ScheduleSettings,
    /// When the current period began.
    period: Duration,
    /// Rounds done in this monitoring, with the one that clears; 0: no monitoring runs.
    rounds: u8,
    /// When the last round was done.
    looked: Duration,
    /// Whether this period has had its monitoring, or goes without.
    is_done: bool,
    /// Quiet monitorings in a row.
    quiet: u8,
    /// Periods that are still to be left out.
    left_out: u8,
}

impl Schedule {
    /// A schedule from `now` on. The first monitoring begins at once.
    ///
    /// # Errors
    /// [`BadSchedule`].
    pub fn new(settings: ScheduleSettings, now: Duration) -> Result<Schedule, BadSchedule> {
        settings.check()?;
        Ok(Schedule {
            settings,
            period: now,
            rounds: 0,
            looked: now,
            is_done: false,
            quiet: 0,
            left_out: 0,
        })
    }

    /// Returns what to do now, and assumes that it is done. `now` must not go backwards.
    pub fn step(&mut self, now: Duration) -> Step {
        if self.rounds > 0 {
            return self.look(now);
        }
        while self.is_done {
            let next = self.period.saturating_add(self.settings.period);
            if now < next {
                return Step::Wait(next);
            }
            self.next_period(now);
        }
        (self.rounds, self.looked) = (1, now);
        Step::Begin
    }

    /// Notes how much memory was moved after a monitoring.
    pub fn moved(&mut self, bytes: u64) {
        self.quiet = match bytes < self.settings.quiet_bytes {
            true => (self.quiet + 1).min(self.settings.quiet_max),
            false => 0,
        };
        self.left_out = self.quiet;
    }

    /// Has the next period monitor, because something other than the VM's own uses changed.
    pub fn disturb(&mut self) {
        (self.quiet, self.left_out) = (0, 0);
    }

    fn look(&mut self, now: Duration) -> Step {
        let next = self.looked.saturating_add(self.settings.window);
        if now < next {
            return Step::Wait(next);
        }
        // A late look makes its own window longer, not the next one shorter.
        self.looked = now;
        if self.rounds < self.settings.rounds {
            self.rounds += 1;
            return Step::Look;
        }
        (self.rounds, self.is_done) = (0, true);
        Step::Last
    }

    fn next_period(&mut self, now: Duration) {
        self.period = self.period.saturating_add(self.settings.period);
        if self.period.saturating_add(self.settings.period) <= now {
            // Nobody asked for a whole period: the periods to leave out are over too.
            (self.period, self.left_out) = (now, 0);
        }
        self.is_done = self.left_out > 0;
        self.left_out = self.left_out.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// When the monitorings of the first `minutes` begin, in seconds, and how many rounds each has.
    /// Each moves `moved` bytes.
    fn begins(settings: ScheduleSettings, minutes: u32, moved: u64) -> Vec<(u64, u32)> {
        let mut schedule = Schedule::new(settings, Duration::ZERO).unwrap();
        let (mut now, mut found) = (Duration::ZERO, Vec::<(u64, u32)>::new());
        while now < minutes * Duration::from_secs(60) {
            match schedule.step(now) {
                Step::Wait(until) => {
                    assert!(until > now);
                    now = until;
                }
                Step::Begin => found.push((now.as_secs(), 0)),
                Step::Look | Step::Last if found.is_empty() => panic!("a look before the begin"),
                step => {
                    found.last_mut().unwrap().1 += 1;
                    if step == Step::Last {
                        schedule.moved(moved);
                    }
                }
            }
        }
        found
    }

    #[test]
    fn every_minute_eight_windows() {
        let each = |period: u64| (0..6u64).map(|index| (index * period, 8)).collect::<Vec<_>>();
        assert_eq!(begins(ScheduleSettings::default(), 6, u64::MAX), each(60));
        assert_eq!(begins(ScheduleSettings::huge(), 12, 256 << 20), each(120));
    }

    #[test]
    fn quiet_ones_leave_out_more_and_more_up_to_three() {
        let found = begins(ScheduleSettings::default(), 18, (256 << 20) - 1);
        let minutes: Vec<u64> = found.iter().map(|(second, _)| second / 60).collect();
        assert_eq!(minutes, [0, 2, 5, 9, 13, 17]);
        assert_eq!(ScheduleSettings::default().rarest(), Duration::from_secs(4 * 60));
    }

    #[test]
    fn one_that_moved_something_ends_the_quiet() {
        let mut schedule = Schedule::new(ScheduleSettings::default(), Duration::ZERO).unwrap();
        (0..3).for_each(|_| schedule.moved(0));
        assert_eq!(schedule.left_out, 3);
        schedule.moved(1 << 30);
        assert_eq!(schedule.left_out, 0);
        schedule.moved(0);
        assert_eq!(schedule.left_out, 1);
        schedule.disturb();
        assert_eq!(schedule.left_out, 0);
    }

    #[test]
    fn a_late_look_lengthens_its_window() {
        let mut schedule = Schedule::new(ScheduleSettings::default(), Duration::ZERO).unwrap();
        assert_eq!(schedule.step(Duration::ZERO), Step::Begin);
        assert_eq!(schedule.step(599 * MS), Step::Wait(600 * MS));
        assert_eq!(schedule.step(5000 * MS), Step::Look);
        assert_eq!(schedule.step(5001 * MS), Step::Wait(5600 * MS));
    }

    #[test]
    fn missed_periods_cause_one_monitoring() {
        let mut schedule = Schedule::new(ScheduleSettings::default(), Duration::ZERO).unwrap();
        let day = Duration::from_secs(86400);
        assert_eq!((0..9).map(|index| schedule.step(index * 600 * MS)).last(), Some(Step::Last));
        schedule.moved(0);
        assert_eq!(schedule.step(day), Step::Begin);
        let rest = (1..9).map(|index| schedule.step(day + index * 600 * MS));
        assert_eq!(rest.last(), Some(Step::Last));
        assert_eq!(schedule.step(day + 5000 * MS), Step::Wait(day + Duration::from_secs(60)));
    }

    #[test]
    fn settings_that_contradict_each_other_fail() {
        let bad = |change: fn(&mut ScheduleSettings)| {
            let mut settings = ScheduleSettings::default();
            change(&mut settings);
            settings.check().unwrap_err()
        };
        assert_eq!(bad(|s| s.rounds = 0), BadSchedule::Windows);
        assert_eq!(bad(|s| s.rounds = 251), BadSchedule::Windows);
        assert_eq!(bad(|s| s.window = Duration::ZERO), BadSchedule::Windows);
        let error = bad(|s| s.period = 4799 * MS).to_string();
        assert_eq!(error, "8 windows of 600ms do not fit into a period of 4.799s");
        assert!(matches!(bad(|s| s.window = Duration::MAX), BadSchedule::Period { .. }));
    }
}
