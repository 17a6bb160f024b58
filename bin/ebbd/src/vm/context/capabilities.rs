//! The mechanisms that can change a VM's size, as its VMM last reported them.

use std::sync::Arc;

use ebb_api::{BalloonStatus, DeviceServer, DriverState, GuestFigures, MemoryDeviceStatus};
use ebb_policy::need::MemoryFigures;
use ebb_policy::resize::{BalloonPart, DevicePart, Driver};
use ebb_units::Gpa;
use ebb_virtio_mem::Device;
use ebb_vm::balloon::{self, Balloon};
use ebb_vm::driver::GuestDriver;
use ebb_vm::memory_device::{self, MemoryDevice};
use ebb_vm::qmp::QmpError;
use ebb_vm::{Qmp, Region};

use crate::serve::growth::Growth;

/// A device by which the guest plugs memory, whoever serves it.
pub enum Plugger {
    /// A device of QEMU's, driven by QMP.
    Qemu(MemoryDevice),
    /// A device that Ebb serves.
    Ebb {
        /// The device.
        device: Arc<Device>,
        /// The guest's NUMA node.
        node: u32,
        /// Whether the guest drives it.
        driver: Driver,
    },
}

impl Plugger {
    /// Returns the device as it is now.
    pub fn device(&self) -> DevicePart {
        match self {
            Plugger::Qemu(device) => DevicePart {
                node: device.node,
                plugged_bytes: device.plugged_bytes,
                requested_bytes: device.requested_bytes,
                max_bytes: device.max_bytes,
                block_bytes: device.block_bytes,
                driver: driver_of(&device.driver),
            },
            Plugger::Ebb { device, node, driver } => {
                let (sizes, geometry) = (device.sizes(), device.geometry());
                DevicePart {
                    node: *node,
                    plugged_bytes: sizes.plugged_bytes,
                    requested_bytes: sizes.requested_bytes,
                    max_bytes: geometry.region_bytes,
                    block_bytes: geometry.block_bytes,
                    driver: *driver,
                }
            }
        }
    }

    /// Returns who serves the device, and how often the guest touched unplugged memory of it, if
    /// that is known.
    fn server(&self) -> (DeviceServer, Option<u64>) {
        match self {
            Plugger::Qemu(_) => (DeviceServer::Qemu, None),
            Plugger::Ebb { device, .. } => (DeviceServer::Ebb, Some(device.guard().violations())),
        }
    }

    /// Asks the guest to have `bytes` plugged.
    ///
    /// # Errors
    /// The VMM's refusal, or the device's.
    pub fn request(&mut self, qmp: &mut Qmp, bytes: u64) -> Result<(), String> {
        match self {
            Plugger::Qemu(device) => {
                memory_device::request(qmp, device, bytes).map_err(|error| error.to_string())?;
                device.requested_bytes = bytes;
                Ok(())
            }
            Plugger::Ebb { device, .. } => {
                device.request_bytes(bytes).map_err(|error| error.to_string())
            }
        }
    }

    /// Returns where the device's memory begins.
    pub fn address(&self) -> Gpa {
        match self {
            Plugger::Qemu(device) => device.address,
            Plugger::Ebb { device, .. } => device.geometry().start,
        }
    }

    /// Whether the device plugs this region.
    pub fn has(&self, region: &Region) -> bool {
        let (address, bytes) = (self.address(), self.device().max_bytes);
        region.gpa >= address && region.gpa.0 - address.0 < bytes
    }
}

/// All capabilities that were reported.
pub struct Capabilities {
    /// The memory that the VM began with, in bytes.
    pub initial_bytes: u64,
    /// The memory that the VM began with, in bytes for each NUMA node.
    pub node_bytes: Vec<u64>,
    /// The devices that plug memory.
    pub pluggers: Vec<Plugger>,
    /// The balloon, if the VM has one.
    pub balloon: Option<Balloon>,
}

impl Capabilities {
    /// Asks QEMU, and the devices that Ebb serves.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn ask(qmp: &mut Qmp, own: &Growth) -> Result<Capabilities, QmpError> {
        let memory = memory_device::look(qmp)?;
        let balloon = balloon::look(qmp, memory.initial_bytes)?;
        let mut pluggers: Vec<_> = memory.devices.into_iter().map(Plugger::Qemu).collect();
        let own = (0..).zip(own.devices());
        pluggers.extend(own.map(|(node, (device, driven))| {
            let driver = if driven { Driver::Ready } else { Driver::Absent };
            Plugger::Ebb { device: Arc::clone(device), node, driver }
        }));
        Ok(Capabilities {
            initial_bytes: memory.initial_bytes,
            node_bytes: memory.node_bytes,
            pluggers,
            balloon,
        })
    }

    /// Returns the devices as QEMU last reported them.
    pub fn devices(&self) -> Vec<DevicePart> {
        self.pluggers.iter().map(Plugger::device).collect()
    }

    /// Returns the balloon as QEMU last reported it.
    pub fn balloon_part(&self) -> Option<BalloonPart> {
        let balloon = self.balloon.as_ref()?;
        let driver = driver_of(&balloon.driver);
        Some(BalloonPart { ballooned_bytes: balloon.held_bytes, driver })
    }

    /// Returns how much memory is unplugged and can be plugged, in bytes.
    pub fn unplugged_bytes(&self) -> u64 {
        let left = |device: DevicePart| device.max_bytes.saturating_sub(device.plugged_bytes);
        self.devices().into_iter().map(left).sum()
    }

    /// Returns the guest's own figures, if it reported them after `since_s` (seconds since 1970).
    pub fn figures(&self, since_s: u64) -> Option<MemoryFigures> {
        let stats = self.balloon.as_ref()?.stats;
        let figures = MemoryFigures {
            total_bytes: stats.total_bytes?,
            available_bytes: stats.available_bytes?,
        };
        (stats.updated_s > since_s).then_some(figures)
    }

    /// Returns the devices for the status.
    pub fn device_status(&self) -> Vec<MemoryDeviceStatus> {
        let status = |plugger: &Plugger| {
            let (device, (served_by, violations)) = (plugger.device(), plugger.server());
            MemoryDeviceStatus {
                node: device.node,
                plugged_bytes: device.plugged_bytes,
                requested_bytes: device.requested_bytes,
                max_bytes: device.max_bytes,
                block_bytes: device.block_bytes,
                driver: driver_state(device.driver),
                served_by,
                violations,
            }
        };
        self.pluggers.iter().map(status).collect()
    }

    /// Returns the balloon for the status. `now_s`: seconds since 1970.
    pub fn balloon_status(&self, now_s: u64, releases: u64) -> Option<BalloonStatus> {
        let balloon = self.balloon.as_ref()?;
        let stats = balloon.stats;
        let figures = GuestFigures {
            age_s: now_s.saturating_sub(stats.updated_s),
            total_bytes: stats.total_bytes,
            free_bytes: stats.free_bytes,
            available_bytes: stats.available_bytes,
            cache_bytes: stats.cache_bytes,
            swapped_in_bytes: stats.swapped_in_bytes,
            swapped_out_bytes: stats.swapped_out_bytes,
            major_faults: stats.major_faults,
            minor_faults: stats.minor_faults,
        };
        Some(BalloonStatus {
            ballooned_bytes: balloon.held_bytes,
            driver: driver_state(driver_of(&balloon.driver)),
            deflates_on_oom: balloon.deflates_on_oom,
            releases,
            reporting_offered: balloon.reporting_offered,
            reporting: balloon.is_reporting(),
            figures: (stats.updated_s > 0).then_some(figures),
        })
    }
}

fn driver_of(driver: &GuestDriver) -> Driver {
    match driver {
        GuestDriver::Ready { .. } => Driver::Ready,
        GuestDriver::Absent => Driver::Absent,
        GuestDriver::Unknown => Driver::Unknown,
    }
}

fn driver_state(driver: Driver) -> DriverState {
    match driver {
        Driver::Ready => DriverState::Ready,
        Driver::Absent => DriverState::Absent,
        Driver::Unknown => DriverState::Unknown,
    }
}
