//! Which devices reach a VM's memory by themselves, as QEMU told last, and what may be taken of
//! the memory beside them. `docs/devices.md`.

use std::sync::Arc;

use ebb_vm::reach::{self, Device, Kind, Migration, Reach};

use crate::model::api_error::{Answer, not_allowed};
use crate::support::open_files::Descriptors;

/// What is known of them. `vm::devices` keeps it up.
#[derive(Default)]
pub struct Reaching {
    /// The VMM's descriptors just before QEMU was asked last.
    pub seen: Option<Arc<Descriptors>>,
    /// Devices that were found.
    pub found: Vec<Device>,
    /// The VM's migration, which may be one.
    pub migration: Migration,
    /// Whether QEMU told all at the last look.
    pub is_told: bool,
}

impl Reaching {
    /// All that leave less than everything to be taken.
    pub fn all(&self) -> Vec<Device> {
        let mut all = self.found.clone();
        all.extend(self.migration.shared.clone());
        all.extend((!self.is_told).then(Device::unknown));
        all
    }

    /// What of the VM's memory may be taken.
    pub fn reach(&self) -> Reach {
        reach::reach(&self.all())
    }

    /// Whether no device can have come since the last look.
    pub fn is_as_seen(&self) -> bool {
        self.seen.as_ref().is_some_and(|seen| seen.holds())
    }

    /// Whether free memory may be taken.
    ///
    /// # Errors
    /// The device in the way.
    pub fn may_take(&self) -> Answer<()> {
        let all = self.all();
        let in_the_way =
            reach::narrowest(&all).filter(|found| found.kind.reach() == Reach::Nothing);
        in_the_way.map_or(Ok(()), |device| {
            Err(not_allowed(format!("no memory is taken because of {device}")))
        })
    }
}

/// Whether memory in use may be evicted beside `devices`.
///
/// # Errors
/// The device in the way.
pub fn may_evict_beside(devices: &[Device]) -> Answer<()> {
    match reach::narrowest(devices) {
        None => Ok(()),
        Some(device) => Err(not_allowed(format!(
            "memory in use is not evicted because of {device}{}",
            match (device.kind.reach(), device.kind) {
                (Reach::Nothing, _) => "; neither is free memory taken",
                (_, Kind::VhostUser) => {
                    "; free memory is taken (reclaim, auto), and ebb run --disk serves disks beside \
                     a limit"
                }
                _ => "; free memory is taken (reclaim, auto)",
            }
        ))),
    }
}
