//! What the pager asks and tells when the guest touches a reclaimed huge frame.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ebb_pager::{Sharer, Sharing};
use ebb_units::HugeFrame;

use super::{HyperAlloc, State};

impl Sharer for HyperAlloc {
    fn sharing(&self, huge: HugeFrame) -> Sharing {
        match self.state(huge) {
            State::Installed => Sharing::Apart,
            State::Soft => Sharing::Soft,
            State::Hard => Sharing::Hard,
        }
    }

    fn installed(&self, huge: HugeFrame, took: Duration) {
        let Some((zone, index)) = self.find(huge) else { return };
        zone.states.set(index, State::Installed);
        self.clear_evicted(zone, index);
        self.installs.fetch_add(1, Relaxed);
        self.install.record(took);
    }

    fn violated(&self, _huge: HugeFrame) {
        self.violations.fetch_add(1, Relaxed);
        if let Some(tell) = self.on_violation.get() {
            tell();
        }
    }
}
