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
    /// The most that the VM could give back: free memory of its guest that is resident.
    pub spare_bytes: u64,
    /// Whether it knows that its host is watched.
    pub is_told: bool,
}

impl Watched {
    /// The VM of this status; none: it does not reclaim under host pressure.
    pub fn of(status: &VmStatus) -> Option<Watched> {
        let auto = &status.auto;
        (auto.on && auto.when == ReclaimWhen::Pressure).then(|| Watched {
            below: match (auto.below_bytes, auto.below_percent) {
                (Some(bytes), _) => Below::Bytes(bytes),
                (None, percent) => Below::Percent(percent.unwrap_or(BELOW_PERCENT_DEFAULT)),
            },
            spare_bytes: status.guest_free_bytes.unwrap_or(0).min(status.resident_bytes),
            is_told: auto.pressure.as_ref().is_some_and(|told| told.seen_by.is_some()),
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
        let watched = Watched::of(&status()).expect("it is in this mode");
        assert_eq!((watched.below, watched.is_told), (Below::Percent(10), true));
        assert_eq!(watched.spare_bytes, status().resident_bytes);
        let mut other = status();
        (other.auto.below_bytes, other.auto.pressure, other.guest_free_bytes) =
            (Some(7), None, Some(5));
        let watched = Watched::of(&other).expect("it is in this mode");
        assert_eq!(watched, Watched { below: Below::Bytes(7), spare_bytes: 5, is_told: false });
        other.auto.when = ReclaimWhen::Interval;
        assert_eq!(Watched::of(&other), None);
        let mut off = status();
        off.auto.on = false;
        assert_eq!(Watched::of(&off), None);
    }
}
