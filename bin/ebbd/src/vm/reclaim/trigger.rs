//! What begins a round of automatic reclaim: the end of an interval, or `ebbd`, which watches the
//! host's memory. See `docs/decisions/0048-*`.

use std::time::{Duration, Instant};

use ebb_api::{PressureStatus, ReclaimWhen};

use crate::model::auto::Auto;
use crate::model::host_pressure::PressureNotice;

/// `ebbd` speaks every 10 s at least. After a silence as long as this it does not watch the host,
/// and intervals count.
const SILENCE_MOST: Duration = Duration::from_secs(30);

/// What begins the rounds of one VM.
pub struct Trigger {
    /// When the next round at intervals is due.
    due: Instant,
    /// When `ebbd` spoke last, or since when it is expected to.
    heard: Instant,
    /// By what `ebbd` sees host pressure; none: it has not spoken.
    seen_by: Option<String>,
    /// Whether there was pressure when it spoke last.
    is_pressed: bool,
    /// Rounds that pressure began, and that were made.
    rounds: u64,
    /// Why the last of them began, and when.
    last: Option<(String, Instant)>,
}

impl Trigger {
    /// A trigger that has heard nothing yet.
    pub fn new(now: Instant) -> Trigger {
        let (seen_by, is_pressed, rounds, last) = (None, false, 0, None);
        Trigger { due: now, heard: now, seen_by, is_pressed, rounds, last }
    }

    /// Begins anew with settings that have changed.
    pub fn begin(&mut self, now: Instant) {
        let (rounds, last) = (self.rounds, self.last.take());
        *self = Trigger { rounds, last, ..Trigger::new(now) };
    }

    /// Whether a round at intervals is due. If so, the next one is due after the interval.
    pub fn is_due(&mut self, auto: &Auto, now: Instant) -> bool {
        let is_due = auto.on && self.is_by_interval(auto, now) && now >= self.due;
        if is_due {
            self.due = now + Duration::from_millis(auto.interval_ms);
        }
        is_due
    }

    /// Whether free memory of the guest is wanted now: at any time by intervals, else under
    /// pressure.
    pub fn is_wanted(&self, auto: &Auto, now: Instant) -> bool {
        auto.on && (self.is_by_interval(auto, now) || self.is_pressed)
    }

    /// Notes what `ebbd` says. Returns why a round is to begin; none: none is.
    pub fn hear(&mut self, auto: &Auto, notice: PressureNotice, now: Instant) -> Option<String> {
        let PressureNotice { seen_by, why } = notice;
        (self.heard, self.seen_by, self.is_pressed) = (now, Some(seen_by), why.is_some());
        why.filter(|_| auto.on && auto.when == ReclaimWhen::Pressure)
    }

    /// Notes a round that pressure began, and why.
    pub fn note_round(&mut self, why: String, now: Instant) {
        self.rounds += 1;
        self.last = Some((why, now));
    }

    /// Host pressure, as the API tells it; none: intervals were asked for.
    pub fn status(&self, auto: &Auto, now: Instant) -> Option<PressureStatus> {
        let age_s = |at: &Instant| now.saturating_duration_since(*at).as_secs();
        (auto.when == ReclaimWhen::Pressure).then(|| PressureStatus {
            seen_by: self.seen_by.clone().filter(|_| self.is_watched(now)),
            rounds: self.rounds,
            why: self.last.as_ref().map(|(why, _)| why.clone()),
            age_s: self.last.as_ref().map(|(_, at)| age_s(at)),
        })
    }

    fn is_by_interval(&self, auto: &Auto, now: Instant) -> bool {
        auto.when == ReclaimWhen::Interval || !self.is_watched(now)
    }

    fn is_watched(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard) < SILENCE_MOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn auto(when: ReclaimWhen) -> Auto {
        Auto { on: true, when, ..Auto::default() }
    }

    fn notice(why: Option<&str>) -> PressureNotice {
        PressureNotice { seen_by: "PSI".into(), why: why.map(str::to_owned) }
    }

    #[test]
    fn an_interval_begins_rounds_whatever_the_host_has() {
        let (at, auto) = (Instant::now(), auto(ReclaimWhen::Interval));
        let mut trigger = Trigger::new(at);
        assert!(trigger.is_due(&auto, at) && !trigger.is_due(&auto, at + 4 * SECOND));
        assert!(trigger.is_due(&auto, at + 5 * SECOND));
        assert_eq!(trigger.hear(&auto, notice(Some("short")), at), None);
        assert_eq!(trigger.status(&auto, at), None);
        assert!(!trigger.is_due(&Auto { on: false, ..auto }, at + 60 * SECOND));
    }

    #[test]
    fn pressure_begins_rounds_while_the_host_is_watched() {
        let (at, auto) = (Instant::now(), auto(ReclaimWhen::Pressure));
        let mut trigger = Trigger::new(at);
        // `ebbd` has time to speak.
        assert!(!trigger.is_due(&auto, at + 29 * SECOND));
        let heard = at + 29 * SECOND;
        assert_eq!(trigger.hear(&auto, notice(None), heard), None);
        assert!(!trigger.is_wanted(&auto, heard));
        let why = trigger.hear(&auto, notice(Some("short")), heard).expect("a round is to begin");
        assert!(trigger.is_wanted(&auto, heard) && !trigger.is_due(&auto, heard));
        // It has not been made yet.
        let told = trigger.status(&auto, heard).expect("it is in this mode");
        assert_eq!((told.rounds, told.why), (0, None));
        trigger.note_round(why, heard);
        let told = trigger.status(&auto, heard + 7 * SECOND).expect("it is in this mode");
        let [seen_by, why] = ["PSI", "short"].map(|text| Some(text.to_owned()));
        assert_eq!(told, PressureStatus { seen_by, rounds: 1, why, age_s: Some(7) });
        let off = Auto { on: false, ..auto };
        assert_eq!(trigger.hear(&off, notice(Some("short")), heard), None);
    }

    #[test]
    fn intervals_count_once_ebbd_is_silent() {
        let (at, auto) = (Instant::now(), auto(ReclaimWhen::Pressure));
        let mut trigger = Trigger::new(at);
        let why = trigger.hear(&auto, notice(Some("short")), at).expect("a round is to begin");
        trigger.note_round(why, at);
        let silent = at + SILENCE_MOST;
        assert!(trigger.is_due(&auto, silent) && !trigger.is_due(&auto, silent + 4 * SECOND));
        let told = trigger.status(&auto, silent).expect("it is in this mode");
        assert_eq!((told.seen_by, told.rounds), (None, 1));
        trigger.hear(&auto, notice(None), silent + 5 * SECOND);
        assert!(!trigger.is_due(&auto, silent + 5 * SECOND));
        // Other settings: `ebbd` is to speak of them first.
        trigger.begin(silent + 6 * SECOND);
        let told = trigger.status(&auto, silent + 6 * SECOND).expect("it is in this mode");
        assert_eq!((told.seen_by, told.rounds, told.age_s), (None, 1, Some(36)));
    }
}
