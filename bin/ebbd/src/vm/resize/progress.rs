//! How far a VM is on the way to its target size.

use std::time::{Duration, Instant};

use ebb_api::SizeState;
use ebb_policy::need::MemoryFigures;
use ebb_policy::resize::{Mechanism, Plan};

/// No progress for this long means stalled. Linux tries again after 5 s when it could not unplug a
/// block, then less and less often.
const STILL: Duration = Duration::from_secs(6);
/// Memory to take at once from a guest that can spare it, in bytes.
const AT_ONCE_BYTES: u64 = 32 << 20;
/// How long a guest that had its balloon back is left alone the first time. Each further time
/// doubles it.
const PAUSE_MIN: Duration = Duration::from_secs(30);
/// Longest time that such a guest is left alone.
const PAUSE_MAX: Duration = Duration::from_secs(8 * 60);

/// The progress of a VM to one target.
pub struct Progress {
    /// The mechanism that was to change the size when the progress began.
    pub mechanism: Mechanism,
    /// Why this mechanism.
    pub reason: String,
    /// The VM's size when the progress began.
    pub start_bytes: u64,
    /// The VM's resident memory when the progress began.
    pub start_resident_bytes: u64,
    /// Why a step could not be requested from the VMM.
    pub failure: Option<String>,
    /// The least memory that the guest can have now.
    pub least_bytes: Option<u64>,
    /// What the guest may have in this step: no less than it can live with.
    step_bytes: Option<u64>,
    /// Whether figures that the guest has reported since it has this size let it shrink no further.
    at_least: bool,
    /// What the mechanism itself said at its end, if it ends by itself.
    pub blocked_reason: Option<String>,
    began: Instant,
    /// The size at the last look.
    size_bytes: u64,
    /// How far from the target the size was at the last look.
    distance_bytes: Option<u64>,
    /// When the size last came closer to the target.
    closer: Instant,
    /// When the size changed last.
    changed: Instant,
    /// When the size changed last, in seconds since 1970.
    changed_s: u64,
    pause: Option<(Instant, Duration)>,
}

impl Progress {
    /// Begins with the VM as it is now.
    pub fn new(plan: &Plan, size_bytes: u64, resident_bytes: u64, now_s: u64) -> Progress {
        let now = Instant::now();
        Progress {
            mechanism: plan.mechanism,
            reason: plan.reason.clone(),
            start_bytes: size_bytes,
            start_resident_bytes: resident_bytes,
            failure: None,
            least_bytes: None,
            step_bytes: None,
            at_least: false,
            blocked_reason: None,
            began: now,
            size_bytes,
            distance_bytes: None,
            closer: now,
            changed: now,
            changed_s: now_s,
            pause: None,
        }
    }

    /// Returns the time, in seconds since 1970, before which the guest's figures say nothing about
    /// what it has now.
    pub fn figures_since_s(&self) -> u64 {
        self.changed_s
    }

    /// Returns how long the size has been what it is.
    pub fn since_change(&self) -> Duration {
        self.changed.elapsed()
    }

    /// Notes the present size.
    pub fn note_size(&mut self, size_bytes: u64, wanted_bytes: u64, now_s: u64) {
        if size_bytes != self.size_bytes {
            (self.size_bytes, self.at_least) = (size_bytes, false);
            (self.changed, self.changed_s) = (Instant::now(), now_s);
        }
        let distance = size_bytes.abs_diff(wanted_bytes);
        if self.distance_bytes.is_none_or(|before| distance < before) {
            self.closer = Instant::now();
        }
        self.distance_bytes = Some(distance);
    }

    /// Returns what the guest may have next on the way down to `wanted_bytes`: a whole number of
    /// `piece_bytes` above that. A step takes half of what the guest can spare by its own figures,
    /// or a little; the next one waits for figures that come after this one.
    pub fn step(
        &mut self,
        wanted_bytes: u64,
        figures: Option<MemoryFigures>,
        piece_bytes: u64,
    ) -> u64 {
        let size = self.size_bytes;
        if wanted_bytes >= size {
            (self.step_bytes, self.least_bytes, self.at_least) = (None, None, false);
            return wanted_bytes;
        }
        let above = |bytes: u64| wanted_bytes + (bytes - wanted_bytes) / piece_bytes * piece_bytes;
        if let Some(figures) = figures {
            let spare = figures.spare_bytes();
            self.least_bytes = Some(size.saturating_sub(spare));
            // What the guest can spare shrinks by more than the step takes.
            let taken = (spare / 2).max(spare.min(AT_ONCE_BYTES));
            let least = (size - taken.min(size)).max(wanted_bytes);
            let step = above(least.saturating_add(piece_bytes - 1)).min(above(size));
            (self.step_bytes, self.at_least) = (Some(step), step == above(size));
        }
        // Without any word of the guest's, nothing is taken.
        self.step_bytes.unwrap_or(size).clamp(wanted_bytes, above(size).max(wanted_bytes))
    }

    /// Whether the guest's need blocks further progress.
    pub fn is_at_least(&self) -> bool {
        self.at_least
    }

    /// Leaves the guest alone for a while, because it had its balloon back.
    pub fn pause(&mut self) {
        let length = self.pause.map_or(PAUSE_MIN, |(_, before)| (before * 2).min(PAUSE_MAX));
        self.pause = Some((Instant::now() + length, length));
        self.step_bytes = None;
    }

    /// Returns for how much longer the guest is left alone.
    pub fn pause_left(&self) -> Option<Duration> {
        let (end, _) = self.pause?;
        Some(end.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    /// Handles a reset of the guest: what the old kernel reported and had no longer counts.
    pub fn begin_again(&mut self, now_s: u64) {
        (self.step_bytes, self.least_bytes, self.pause) = (None, None, None);
        (self.at_least, self.blocked_reason) = (false, None);
        (self.distance_bytes, self.closer) = (None, Instant::now());
        (self.changed, self.changed_s) = (Instant::now(), now_s);
    }

    /// Returns how far the VM is. Sizes closer than `piece_bytes` count as the same.
    pub fn state(&self, piece_bytes: u64) -> SizeState {
        match self.distance_bytes {
            Some(distance) if distance < piece_bytes => SizeState::Reached,
            _ if self.pause_left().is_some() || self.at_least => SizeState::Waiting,
            _ if self.blocked_reason.is_some() => SizeState::Waiting,
            _ if self.closer.elapsed() < STILL => SizeState::Moving,
            _ => SizeState::Waiting,
        }
    }

    /// Returns how long it took to get as far as the VM is.
    pub fn took(&self, state: SizeState) -> Duration {
        match state {
            SizeState::Moving => self.began.elapsed(),
            _ => self.closer.saturating_duration_since(self.began),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn progress(size_bytes: u64) -> Progress {
        let plan = Plan {
            mechanism: Mechanism::Balloon,
            reason: String::new(),
            requested_bytes: vec![],
            ballooned_bytes: 0,
            hard_bytes: 0,
        };
        Progress::new(&plan, size_bytes, 0, 100)
    }

    fn available(mib: u64) -> Option<MemoryFigures> {
        Some(MemoryFigures { total_bytes: 1024 * MIB, available_bytes: mib * MIB })
    }

    #[test]
    fn a_step_leaves_the_guest_its_reserve() {
        let mut progress = progress(1024 * MIB);
        assert_eq!(progress.step(100 * MIB, None, 4096), 1024 * MIB);
        assert_eq!(progress.step(100 * MIB, available(500), 4096), 806 * MIB);
        // The step stays until the guest tells what came of it.
        progress.note_size(810 * MIB, 100 * MIB, 101);
        assert_eq!(progress.step(100 * MIB, None, 4096), 806 * MIB);
        assert!(!progress.is_at_least());
        progress.note_size(806 * MIB, 100 * MIB, 102);
        assert!(!progress.is_at_least());
        assert_eq!(progress.step(100 * MIB, available(96), 4096), 774 * MIB);
        assert!(!progress.is_at_least());
        assert_eq!(progress.step(100 * MIB, available(10), 4096), 806 * MIB);
        assert!(progress.is_at_least() && progress.state(1) == SizeState::Waiting);
        assert_eq!(progress.step(900 * MIB, available(10), 4096), 900 * MIB);
    }

    #[test]
    fn steps_are_whole_pieces_above_the_size_wanted() {
        let mut progress = progress(1024 * MIB);
        assert_eq!(progress.step(101 * MIB, available(500), 2 * MIB), 807 * MIB);
        let mut progress = self::progress(1000 * MIB);
        assert_eq!(progress.step(999 * MIB, available(64), 2 * MIB), 999 * MIB);
        assert_eq!(progress.step(900 * MIB, available(64), 3 * MIB), 999 * MIB);
    }

    #[test]
    fn who_gets_closer_moves() {
        let mut progress = progress(1024 * MIB);
        progress.note_size(1024 * MIB, 512 * MIB, 100);
        assert_eq!((progress.state(1), progress.figures_since_s()), (SizeState::Moving, 100));
        progress.note_size(512 * MIB, 512 * MIB, 107);
        assert_eq!((progress.state(1), progress.figures_since_s()), (SizeState::Reached, 107));
        progress.pause();
        assert_eq!(progress.state(1), SizeState::Reached);
        progress.note_size(1024 * MIB, 512 * MIB, 108);
        assert_eq!(progress.state(1), SizeState::Waiting);
        progress.begin_again(109);
        assert_eq!(progress.state(1), SizeState::Moving);
    }
}
