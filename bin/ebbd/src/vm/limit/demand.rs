//! What a VM in the pool asks for because it is short of memory: evicted pages come back to it.
//!
//! A monitoring shows the hot set only once it has ended, which takes seconds. Refills show within
//! a second that a guest has begun to work. So a VM that waits for refills asks for more than it
//! has, until a monitoring that began later tells what it needs. A guest that reads ever new memory
//! is short all the time; such a monitoring then has the last word until the shortage is over.

use std::time::{Duration, Instant};

use ebb_units::FRAME_BYTES;

/// A VM is short of memory if it waits for this many refills a second. With an SSD they take about
/// a thirtieth of a processor's time.
const SHORT_REFILLS: f64 = 256.0;
/// A VM that is short asks for at least one in this many bytes of what it has in addition.
const GROWTH_PART: u64 = 4;
/// A shortage is over after this time without another one.
const OVER_AFTER: Duration = Duration::from_secs(10);
/// A demand ends after this time even if no monitoring has ended since.
const LASTS: Duration = Duration::from_secs(300);
/// Least time from one monitoring that a demand asks for to the next one.
const MONITOR_EVERY: Duration = Duration::from_secs(30);
/// Shorter times are no measure of refills a second.
const LEAST_TIME: Duration = Duration::from_millis(500);

/// All that came back to the VM so far, in frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Refills {
    /// Frames that the guest waited for.
    pub touched: u64,
    /// Frames that were read ahead.
    pub ahead: u64,
}

impl Refills {
    fn bytes(self) -> u64 {
        (self.touched + self.ahead) * FRAME_BYTES
    }
}

/// The demand of one VM.
#[derive(Default)]
pub struct Demand {
    /// The refills when they were last looked at.
    last: Option<(Instant, Refills)>,
    shortage: Option<Shortage>,
    /// When a monitoring was last asked for.
    asked: Option<Instant>,
}

/// A time in which the VM was short of memory again and again.
struct Shortage {
    began: Instant,
    last: Instant,
    /// What the VM asks for.
    wanted_bytes: u64,
}

impl Shortage {
    /// Whether a monitoring has told since it began what the VM needs. `monitored`: when the last
    /// monitoring began that has ended.
    fn is_answered(&self, monitored: Option<Instant>) -> bool {
        monitored.is_some_and(|began| began > self.began)
    }

    /// Whether the VM was short less than this time ago.
    fn is_within(&self, time: Duration, now: Instant) -> bool {
        now.saturating_duration_since(self.last) < time
    }
}

impl Demand {
    /// Handles a guest whose kernel is gone, with all that it asked for. Monitorings stay as far
    /// apart.
    pub fn on_reset(&mut self) {
        *self = Demand { asked: self.asked, ..Demand::default() };
    }

    /// Looks at the refills. `held_bytes`: what the VM has now. `monitored`: when the last
    /// monitoring began that has ended. Returns the bytes that the VM asks for; `None`: it is not
    /// short, or the monitoring tells better.
    pub fn look(
        &mut self,
        now: Instant,
        refills: Refills,
        held_bytes: u64,
        monitored: Option<Instant>,
    ) -> Option<u64> {
        if let Some(came_bytes) = self.shortage_since_last(now, refills) {
            let more_bytes = came_bytes.max(held_bytes / GROWTH_PART);
            self.note_shortage(now, held_bytes.saturating_add(more_bytes));
        }
        let shortage = self.shortage.as_ref()?;
        let counts = !shortage.is_answered(monitored) && shortage.is_within(LASTS, now);
        counts.then_some(shortage.wanted_bytes)
    }

    /// Returns the bytes that came back since the last look, if the VM waited for many of them.
    fn shortage_since_last(&mut self, now: Instant, refills: Refills) -> Option<u64> {
        let (since, before) = *self.last.get_or_insert((now, refills));
        let time = now.saturating_duration_since(since);
        if time < LEAST_TIME {
            return None;
        }
        self.last = Some((now, refills));
        let waited = refills.touched.saturating_sub(before.touched) as f64;
        let is_short = waited / time.as_secs_f64() >= SHORT_REFILLS;
        is_short.then(|| refills.bytes().saturating_sub(before.bytes()))
    }

    fn note_shortage(&mut self, now: Instant, wanted_bytes: u64) {
        let before = self.shortage.as_ref().filter(|before| before.is_within(OVER_AFTER, now));
        let began = before.map_or(now, |before| before.began);
        self.shortage = Some(Shortage { began, last: now, wanted_bytes });
    }

    /// Whether a monitoring is to begin now, to tell what a VM needs that is short of memory.
    /// `monitored`: as for [`Demand::look`].
    pub fn wants_monitoring(&mut self, now: Instant, monitored: Option<Instant>) -> bool {
        let is_open = self.shortage.as_ref().is_some_and(|shortage| {
            !shortage.is_answered(monitored) && shortage.is_within(OVER_AFTER, now)
        });
        let is_soon = |asked: Instant| now.saturating_duration_since(asked) < MONITOR_EVERY;
        let wants = is_open && !self.asked.is_some_and(is_soon);
        if wants {
            self.asked = Some(now);
        }
        wants
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn touched(frames: u64) -> Refills {
        Refills { touched: frames, ahead: 0 }
    }

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn who_waits_for_refills_asks_for_more_until_a_later_monitoring() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        let at = |seconds| after(start, seconds);
        assert_eq!(demand.look(start, touched(0), 60 * MIB, None), None);
        assert_eq!(demand.look(at(1), touched(255), 60 * MIB, None), None);
        assert_eq!(demand.look(at(2), touched(512), 60 * MIB, None), Some(75 * MIB));
        // It lasts without refills, and whatever an earlier monitoring says.
        assert_eq!(demand.look(at(3), touched(512), 75 * MIB, Some(at(1))), Some(75 * MIB));
        assert_eq!(demand.look(at(9), touched(512), 75 * MIB, Some(at(3))), None);
        assert_eq!(demand.look(at(10), touched(512), 75 * MIB, Some(at(3))), None);
    }

    #[test]
    fn who_gets_much_back_asks_for_that_much() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        demand.look(start, Refills::default(), 60 * MIB, None);
        let read = Refills { touched: 500, ahead: 20 * 256 - 500 };
        assert_eq!(demand.look(after(start, 1), read, 60 * MIB, None), Some(80 * MIB));
    }

    /// A backup gains nothing by more memory, which a monitoring shows.
    #[test]
    fn who_is_always_short_has_what_a_monitoring_says() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        demand.look(start, touched(0), 60 * MIB, None);
        let mut at = |second: u64, monitored: Option<u64>| {
            let monitored = monitored.map(|second| after(start, second));
            demand.look(after(start, second), touched(second * 1000), 60 * MIB, monitored)
        };
        assert!(at(1, None).is_some() && at(5, None).is_some());
        assert_eq!(at(9, Some(3)), None);
        assert_eq!(at(18, Some(3)), None);
        // The next shortage counts anew.
        assert!(at(40, Some(3)).is_some());
    }

    #[test]
    fn a_guest_that_resets_itself_is_not_monitored_more_often() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        let mut wants_after = |second: u64| {
            demand.on_reset();
            demand.look(after(start, second), touched(0), 60 * MIB, None);
            demand.look(after(start, second + 1), touched(9999), 60 * MIB, None);
            demand.wants_monitoring(after(start, second + 1), None)
        };
        assert!(wants_after(0));
        assert!(!wants_after(5));
        assert!(wants_after(2 * MONITOR_EVERY.as_secs()));
    }

    #[test]
    fn a_demand_does_not_last_for_ever() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        demand.look(start, touched(0), 60 * MIB, None);
        let short = after(start, 1);
        assert!(demand.look(short, touched(9999), 60 * MIB, None).is_some());
        assert!(demand.look(short + LASTS / 2, touched(9999), 60 * MIB, None).is_some());
        assert_eq!(demand.look(short + LASTS, touched(9999), 60 * MIB, None), None);
    }

    #[test]
    fn two_looks_in_a_moment_are_one() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        demand.look(start, touched(0), 60 * MIB, None);
        let soon = start + Duration::from_millis(10);
        assert_eq!(demand.look(soon, touched(100), 60 * MIB, None), None);
        assert!(demand.look(after(start, 1), touched(300), 60 * MIB, None).is_some());
    }

    #[test]
    fn a_shortage_asks_for_one_monitoring() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        let at = |seconds| after(start, seconds);
        demand.look(start, touched(0), 60 * MIB, None);
        assert!(!demand.wants_monitoring(start, None));
        demand.look(at(1), touched(1000), 60 * MIB, None);
        assert!(demand.wants_monitoring(at(1), None));
        assert!(!demand.wants_monitoring(at(2), None));
        demand.look(at(40), touched(100_000), 60 * MIB, Some(at(3)));
        assert!(demand.wants_monitoring(at(40), Some(at(3))));
        assert!(!demand.wants_monitoring(at(80), Some(at(3))), "it is over");
    }
}
