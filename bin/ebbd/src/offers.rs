//! What a VM offers to change its size by, as its VMM told it last.

use ebb_api::{BalloonStatus, DriverState, GuestFigures, MemoryDeviceStatus};
use ebb_policy::need::Figures;
use ebb_policy::resize::{Balloon as BalloonOffer, Device, Driver};
use ebb_vm::balloon::{self, Balloon};
use ebb_vm::driver::Driver as SeenDriver;
use ebb_vm::memory_device::{self, MemoryDevice};
use ebb_vm::qmp::QmpError;
use ebb_vm::{Qmp, Region};

/// A device by which the guest plugs memory, whoever has it.
pub enum Plugger {
    /// QEMU's own, told by QMP. One of Ebb's own would stand beside it: asked and told without
    /// QMP, and the same to everybody else.
    Qemu(MemoryDevice),
}

impl Plugger {
    /// As it is now.
    pub fn device(&self) -> Device {
        let Plugger::Qemu(device) = self;
        Device {
            node: device.node,
            plugged_bytes: device.plugged_bytes,
            requested_bytes: device.requested_bytes,
            max_bytes: device.max_bytes,
            block_bytes: device.block_bytes,
            driver: offered(&device.driver),
        }
    }

    /// Has the guest plug so much, or so little.
    ///
    /// # Errors
    /// The VMM's refusal.
    pub fn request(&self, qmp: &mut Qmp, bytes: u64) -> Result<(), QmpError> {
        let Plugger::Qemu(device) = self;
        memory_device::request(qmp, device, bytes)
    }

    /// Whether a part of RAM is what it plugs.
    pub fn has(&self, region: &Region) -> bool {
        let Plugger::Qemu(device) = self;
        region.gpa >= device.address && region.gpa.0 - device.address.0 < device.max_bytes
    }
}

/// All that was told.
pub struct Seen {
    /// What the VM began with.
    pub initial_bytes: u64,
    /// The same by NUMA node.
    pub node_bytes: Vec<u64>,
    /// What can be plugged.
    pub pluggers: Vec<Plugger>,
    /// Its balloon.
    pub balloon: Option<Balloon>,
}

impl Seen {
    /// Asks QEMU.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn ask(qmp: &mut Qmp) -> Result<Seen, QmpError> {
        let memory = memory_device::look(qmp)?;
        let balloon = balloon::look(qmp, memory.initial_bytes)?;
        Ok(Seen {
            initial_bytes: memory.initial_bytes,
            node_bytes: memory.node_bytes,
            pluggers: memory.devices.into_iter().map(Plugger::Qemu).collect(),
            balloon,
        })
    }

    /// The devices as they were.
    pub fn devices(&self) -> Vec<Device> {
        self.pluggers.iter().map(Plugger::device).collect()
    }

    /// The balloon as it was.
    pub fn balloon_offer(&self) -> Option<BalloonOffer> {
        let balloon = self.balloon.as_ref()?;
        let driver = offered(&balloon.driver);
        Some(BalloonOffer { ballooned_bytes: balloon.held_bytes, driver })
    }

    /// What can be plugged, and is not.
    pub fn unplugged_bytes(&self) -> u64 {
        let left = |device: Device| device.max_bytes.saturating_sub(device.plugged_bytes);
        self.devices().into_iter().map(left).sum()
    }

    /// The guest's own figures, if it told them after `since_s`, in seconds since 1970.
    pub fn figures(&self, since_s: u64) -> Option<Figures> {
        let stats = self.balloon.as_ref()?.stats;
        let figures =
            Figures { total_bytes: stats.total_bytes?, available_bytes: stats.available_bytes? };
        (stats.updated_s > since_s).then_some(figures)
    }

    /// The devices for the status.
    pub fn device_status(&self) -> Vec<MemoryDeviceStatus> {
        let status = |device: Device| MemoryDeviceStatus {
            node: device.node,
            plugged_bytes: device.plugged_bytes,
            requested_bytes: device.requested_bytes,
            max_bytes: device.max_bytes,
            block_bytes: device.block_bytes,
            driver: state(device.driver),
        };
        self.devices().into_iter().map(status).collect()
    }

    /// The balloon for the status. `now_s`: seconds since 1970.
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
            driver: state(offered(&balloon.driver)),
            deflates_on_oom: balloon.deflates_on_oom,
            releases,
            reporting_offered: balloon.reporting_offered,
            reporting: balloon.is_reporting(),
            figures: (stats.updated_s > 0).then_some(figures),
        })
    }
}

fn offered(driver: &SeenDriver) -> Driver {
    match driver {
        SeenDriver::Ready { .. } => Driver::Ready,
        SeenDriver::Absent => Driver::Absent,
        SeenDriver::Unknown => Driver::Unknown,
    }
}

fn state(driver: Driver) -> DriverState {
    match driver {
        Driver::Ready => DriverState::Ready,
        Driver::Absent => DriverState::Absent,
        Driver::Unknown => DriverState::Unknown,
    }
}
