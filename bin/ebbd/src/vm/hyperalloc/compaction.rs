//! When a guest that shares its allocator is asked to compact its memory. Automatic reclaim takes
//! whole huge frames, and programs and files that come and go leave a few frames in use in each of
//! many.

use std::time::{Duration, Instant};

use ebb_reclaim::hyperalloc::KindUsage;

/// Least scattered memory that is worth the guest's time, in bytes.
const LEAST_BYTES: u64 = 16 << 20;
/// Least part of the huge frames in use that must be scattered to be worth it: one in this many.
const LEAST_PART: u64 = 4;
/// Compaction takes the guest no more than one part in this many of a processor.
const TIME_PART: u32 = 50;
/// Shortest pause between two compactions, and between two looks.
const PAUSE_LEAST: Duration = Duration::from_secs(10);
/// Longest pause between two compactions, where little comes of them.
const PAUSE_MOST: Duration = Duration::from_secs(600);

/// The compaction of one VM.
#[derive(Default)]
pub struct Compaction {
    asked: Option<Asked>,
    pause: Duration,
    paused_until: Option<Instant>,
}

struct Asked {
    at: Instant,
    /// The movable memory in use when the guest was asked.
    before: KindUsage,
}

impl Compaction {
    /// Whether the guest is compacting.
    pub fn is_under_way(&self) -> bool {
        self.asked.is_some()
    }

    /// Whether it is time to look how much is scattered.
    pub fn is_due(&self, now: Instant) -> bool {
        self.paused_until.is_none_or(|until| now >= until)
    }

    /// Whether enough is scattered to ask the guest. If not, the next look is due after a while.
    pub fn begin(&mut self, now: Instant, movable: KindUsage) -> bool {
        let is_worth = scattered(movable) >= LEAST_BYTES.max(movable.huge_bytes / LEAST_PART);
        if is_worth {
            self.asked = Some(Asked { at: now, before: movable });
        } else {
            self.paused_until = Some(now + PAUSE_LEAST);
        }
        is_worth
    }

    /// Notes that the guest could not be asked.
    pub fn give_up(&mut self, now: Instant) {
        (self.asked, self.paused_until) = (None, Some(now + PAUSE_LEAST));
    }

    /// Notes that the guest has tried. The less it gained, the longer it is left alone.
    pub fn end(&mut self, now: Instant, movable: KindUsage) {
        let Some(Asked { at, before }) = self.asked.take() else { return };
        let gained = before.huge_bytes.saturating_sub(movable.huge_bytes);
        self.pause = match gained >= scattered(before) / 2 {
            true => PAUSE_LEAST,
            false => (self.pause * 2).clamp(PAUSE_LEAST, PAUSE_MOST),
        };
        self.paused_until = Some(now + self.pause.max((now - at) * TIME_PART));
    }
}

/// Returns the bytes that would become free if all that is in use lay together.
fn scattered(movable: KindUsage) -> u64 {
    movable.huge_bytes.saturating_sub(movable.used_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn movable(huge_mib: u64, used_mib: u64) -> KindUsage {
        KindUsage { huge_bytes: huge_mib << 20, used_bytes: used_mib << 20 }
    }

    #[test]
    fn only_much_that_is_scattered_is_worth_it() {
        let now = Instant::now();
        let begins = |huge, used| Compaction::default().begin(now, movable(huge, used));
        assert!(begins(40, 20));
        assert!(!begins(40, 25) && !begins(1000, 800) && begins(1000, 700));
        let mut compaction = Compaction::default();
        assert!(compaction.is_due(now) && !compaction.begin(now, movable(8, 1)));
        assert!(!compaction.is_due(now) && compaction.is_due(now + PAUSE_LEAST));
    }

    #[test]
    fn where_little_comes_of_it_the_guest_is_left_alone_for_longer() {
        let (mut compaction, mut now) = (Compaction::default(), Instant::now());
        let mut pause = |after| {
            assert!(compaction.begin(now, movable(100, 40)));
            compaction.end(now, movable(after, 40));
            let before = now;
            while !compaction.is_due(now) {
                now += Duration::from_secs(1);
            }
            (now - before).as_secs()
        };
        assert_eq!([100, 90, 100, 60, 95].map(&mut pause), [10, 20, 40, 10, 20]);
        assert_eq!((0..9).map(|_| pause(100)).last(), Some(600));
    }

    #[test]
    fn it_takes_the_guest_a_part_of_its_time() {
        let (mut compaction, now) = (Compaction::default(), Instant::now());
        compaction.begin(now, movable(100, 40));
        let end = now + Duration::from_secs(3);
        compaction.end(end, movable(50, 40));
        assert!(!compaction.is_due(end + Duration::from_secs(149)));
        assert!(compaction.is_due(end + Duration::from_secs(150)));
    }
}
