//! Which devices reach a VM's memory by themselves, as QEMU last reported, and what may be
//! reclaimed or evicted beside them. `docs/devices.md`.

use std::sync::Arc;

use ebb_vm::reach::{self, DeviceKind, MemoryUser, Migration, Reach};

use crate::model::api_error::{Answer, not_allowed};
use crate::support::open_files::Descriptors;

/// The devices, as far as they are known. `vm::devices` keeps this up to date.
#[derive(Default)]
pub struct Reaching {
    /// The VMM's descriptors just before QEMU was asked last.
    pub descriptors: Option<Arc<Descriptors>>,
    /// The devices that were found.
    pub found: Vec<MemoryUser>,
    /// The VM's migration, which may count as a device.
    pub migration: Migration,
    /// Whether QEMU reported everything at the last look.
    pub is_complete: bool,
}

impl Reaching {
    /// Returns all devices that restrict what may be reclaimed or evicted.
    pub fn all(&self) -> Vec<MemoryUser> {
        let mut all = self.found.clone();
        all.extend(self.migration.shared.clone());
        all.extend((!self.is_complete).then(MemoryUser::unknown));
        all
    }

    /// Returns what of the VM's memory may be reclaimed or evicted.
    pub fn reach(&self) -> Reach {
        reach::reach(&self.all())
    }

    /// Whether no device can have come since the last look.
    pub fn is_unchanged(&self) -> bool {
        self.descriptors.as_ref().is_some_and(|seen| seen.holds())
    }

    /// Succeeds if free memory may be reclaimed.
    ///
    /// # Errors
    /// The device in the way.
    pub fn may_take(&self) -> Answer<()> {
        let all = self.all();
        let blocking = reach::narrowest(&all).filter(|found| found.kind.reach() == Reach::Nothing);
        blocking.map_or(Ok(()), |device| {
            Err(not_allowed(format!("no memory is reclaimed because of {device}")))
        })
    }
}

/// Succeeds if memory in use may be evicted beside `devices`.
///
/// # Errors
/// The device in the way.
pub fn may_evict_beside(devices: &[MemoryUser]) -> Answer<()> {
    match reach::narrowest(devices) {
        None => Ok(()),
        Some(device) => Err(not_allowed(format!(
            "memory in use is not evicted because of {device}{}",
            match (device.kind.reach(), device.kind) {
                (Reach::Nothing, _) => "; free memory is not reclaimed, either",
                (_, DeviceKind::VhostUser) => {
                    "; free memory is reclaimed (ebb reclaim, ebb auto), and disks of ebb run \
                     --disk allow a limit"
                }
                _ => "; free memory is reclaimed (ebb reclaim, ebb auto)",
            }
        ))),
    }
}
