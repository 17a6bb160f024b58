//! What the pilot remembers of the memory that a guest has plugged.

use std::time::Duration;

use super::sight::VmSight;

/// A guest unplugs nothing for this long after it got memory back, after somebody else changed what
/// it has, and after unplugging brought the host nothing.
const REST: Duration = Duration::from_secs(300);
/// A guest is on its way if it unplugged some within this time.
const PROGRESS: Duration = Duration::from_secs(5);
/// Unplugging was worth while if the VM takes less by this part of it.
const CREDIT_PART: u64 = 4;
/// A guest that says nothing for this long may need more than it last said.
const SILENCE: Duration = Duration::from_secs(30);

/// What is remembered of one VM.
#[derive(Default)]
pub(super) struct PlugState {
    /// What was to be plugged when it was seen last, and what before the pilot took any.
    seen: Option<(u64, u64)>,
    /// Since when its guest unplugs nothing.
    rests: Option<Duration>,
    /// What its guest has yet to unplug, and when that became less.
    excess: (u64, Duration),
    /// How much it was to unplug last, and what was resident then; `None`: that is judged.
    asked: Option<(u64, u64)>,
    /// When its guest last said what it needs.
    told: Option<Duration>,
}

impl PlugState {
    /// Notes what is seen of the VM.
    pub fn note(&mut self, vm: &VmSight, now: Duration) {
        let Some(plugged) = vm.plugged else { return };
        if vm.guest.is_some() || self.told.is_none() {
            self.told = Some(now);
        }
        let (asked, full) = (plugged.asked_bytes, plugged.full_bytes);
        let before = self.seen.replace((asked, full));
        if before.is_some_and(|before| asked > before.0 || full != before.1) {
            (self.rests, self.asked) = (Some(now), None);
        }
        let excess = plugged.bytes.saturating_sub(asked);
        if excess == 0 || excess < self.excess.0 {
            self.excess.1 = now;
        }
        self.excess.0 = excess;
        if plugged.bytes == asked
            && let Some((bytes, resident)) = self.asked.take()
            && resident.saturating_sub(vm.resident_bytes) < bytes / CREDIT_PART
        {
            self.rests = Some(now);
        }
    }

    /// What its guest is about to unplug.
    pub fn coming_bytes(&self, now: Duration) -> u64 {
        if now < self.excess.1 + PROGRESS { self.excess.0 } else { 0 }
    }

    /// Whether its guest may be asked to unplug some.
    pub fn may_unplug(&self, now: Duration) -> bool {
        self.rests.is_none_or(|since| now >= since + REST)
    }

    /// Notes that its guest is to unplug so much.
    pub fn unplugs(&mut self, vm: &VmSight, bytes: u64) {
        self.asked = Some((bytes, vm.resident_bytes));
    }

    /// Whether its guest has not said for long what it needs.
    pub fn is_silent(&self, now: Duration) -> bool {
        self.told.is_some_and(|told| now >= told + SILENCE)
    }
}
