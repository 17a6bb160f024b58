//! What `ebbd` and the process of a VM tell each other of host pressure.

use ebb_api::{BELOW_PERCENT_DEFAULT, ReclaimWhen, VmStatus};
use ebb_policy::pressure::Below;
use serde::{Deserialize, Serialize};

/// What `ebbd` tells the process of a VM that reclaims under host pressure, every 10 s at least.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PressureNotice {
    /// By what `ebbd` sees host pressure.
    pub seen_by: String,
    /// Why the VM is to reclaim now; none: it is not.
    pub why: Option<String>,
}

/// A VM that reclaims under host pressure, as it published itself last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watched {
    /// Available memory of the host below which there is pressure.
    pub below: Below,
    /// What the VM can give back at least: free memory of its guest that must be resident, as not
    /// all of it can be elsewhere, without what stays in the guest.
    pub spare_bytes: u64,
    /// Whether something prevents reclaim.
    pub is_stuck: bool,
    /// Whether it knows that its host is watched.
    pub is_aware: bool,
    /// Whether its process can be expected to answer now.
    pub answers: bool,
}

impl Watched {
    /// The VM of this status; none: it does not reclaim under host pressure. `answers`: whether its
    /// process can be expected to answer now.
    pub fn of(status: &VmStatus, answers: bool) -> Option<Watched> {
        let auto = &status.auto;
        let free_bytes = status.guest_free_bytes.unwrap_or(0);
        let elsewhere_bytes = status.memory_bytes.saturating_sub(status.resident_bytes);
        let kept_bytes = elsewhere_bytes.saturating_add(auto.keep_bytes);
        (auto.on && auto.when == ReclaimWhen::Pressure).then(|| Watched {
            below: match (auto.below_bytes, auto.below_percent) {
                (Some(bytes), _) => Below::Bytes(bytes),
                (None, percent) => Below::Percent(percent.unwrap_or(BELOW_PERCENT_DEFAULT)),
            },
            spare_bytes: free_bytes.saturating_sub(kept_bytes),
            is_stuck: auto.stuck.is_some(),
            is_aware: auto.pressure.as_ref().is_some_and(|pressure| pressure.seen_by.is_some()),
            answers,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> VmStatus {
        let text = include_str!("../../../ebb/tests/cli/status.json");
        serde_json::from_str(text).expect("a status")
    }

    #[test]
    fn only_vms_that_are_to_reclaim_under_pressure_are_watched() {
        let watched = Watched::of(&status(), true).expect("it is in this mode");
        assert_eq!((watched.below, watched.is_aware), (Below::Percent(10), true));
        assert_eq!((watched.is_stuck, watched.answers), (false, true));
        let mut other = status();
        (other.auto.below_bytes, other.auto.pressure) = (Some(7), None);
        other.auto.stuck = Some("the guest is not trusted".into());
        let watched = Watched::of(&other, false).expect("it is in this mode");
        assert_eq!((watched.below, watched.is_aware), (Below::Bytes(7), false));
        assert_eq!((watched.is_stuck, watched.answers), (true, false));
        other.auto.when = ReclaimWhen::Interval;
        assert_eq!(Watched::of(&other, true), None);
        let mut off = status();
        off.auto.on = false;
        assert_eq!(Watched::of(&off, true), None);
    }

    #[test]
    fn what_is_elsewhere_or_stays_cannot_be_given() {
        let spare = |resident, free, keep| {
            let mut status = status();
            (status.memory_bytes, status.resident_bytes) = (8000, resident);
            (status.guest_free_bytes, status.auto.keep_bytes) = (free, keep);
            Watched::of(&status, true).map(|watched| watched.spare_bytes)
        };
        assert_eq!(spare(2000, Some(6000), 0), Some(0), "all of it was reclaimed");
        assert_eq!(spare(5000, Some(6000), 0), Some(3000));
        assert_eq!(spare(5000, Some(6000), 1000), Some(2000));
        assert_eq!(spare(9000, Some(500), u64::MAX), Some(0));
        assert_eq!(spare(8000, None, 0), Some(0));
    }
}
