//! What the pilot remembers of the memory that a guest has plugged.

use std::time::Duration;

use super::sight::VmSight;

/// A guest unplugs nothing for this long after it got memory back, after somebody else changed what
/// it has, and after unplugging brought the host nothing.
const REST: Duration = Duration::from_secs(300);
/// What a guest was asked to unplug counts as coming for this long, however it gets on: a slow guest,
/// or one that lies, must not keep the pilot from taking memory elsewhere.
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
    /// What its guest has yet to unplug, whoever has asked for that.
    excess_bytes: u64,
    /// What the pilot asked for last. `None`: that is judged.
    asked: Option<Asked>,
    /// When its guest last said what it needs.
    told: Option<Duration>,
}

/// A request of the pilot's that a guest unplug memory.
struct Asked {
    bytes: u64,
    /// What was resident then.
    resident_bytes: u64,
    at: Duration,
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
        self.excess_bytes = plugged.bytes.saturating_sub(asked);
        if plugged.bytes == asked
            && let Some(Asked { bytes, resident_bytes, .. }) = self.asked.take()
            && resident_bytes.saturating_sub(vm.resident_bytes) < bytes / CREDIT_PART
        {
            self.rests = Some(now);
        }
    }

    /// What its guest is about to unplug for the pilot.
    pub fn coming_bytes(&self, now: Duration) -> u64 {
        let lately = self.asked.as_ref().filter(|asked| now < asked.at + PROGRESS);
        lately.map_or(0, |asked| asked.bytes.min(self.excess_bytes))
    }

    /// Whether its guest may be asked to unplug some.
    pub fn may_unplug(&self, now: Duration) -> bool {
        self.rests.is_none_or(|since| now >= since + REST)
    }

    /// Notes that its guest is to unplug so much.
    pub fn unplugs(&mut self, vm: &VmSight, bytes: u64, now: Duration) {
        self.asked = Some(Asked { bytes, resident_bytes: vm.resident_bytes, at: now });
    }

    /// Whether its guest has not said for long what it needs.
    pub fn is_silent(&self, now: Duration) -> bool {
        self.told.is_some_and(|told| now >= told + SILENCE)
    }
}
