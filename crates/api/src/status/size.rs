//! A VM's size, and the devices that change it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{DeviceServer, DriverState, SizeMechanism, SizeState};

/// The size of a VM: what its guest may have.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SizeStatus {
    /// The size: `initial_bytes + plugged_bytes - ballooned_bytes - hard_bytes`.
    pub bytes: u64,
    /// What it began with.
    pub initial_bytes: u64,
    /// Plugged beyond that.
    pub plugged_bytes: u64,
    /// In the balloon.
    pub ballooned_bytes: u64,
    /// Taken in the allocator that it shares, until returned.
    pub hard_bytes: u64,
    /// The largest size that it can have.
    pub max_bytes: u64,
    /// The size that it is to have, on `wanted_node` if that is not null; null: no other.
    pub wanted_bytes: Option<u64>,
    /// The NUMA node that is about.
    pub wanted_node: Option<u32>,
    /// By what its size changes; null: it is not to.
    pub mechanism: Option<SizeMechanism>,
    /// Why by this.
    pub reason: Option<String>,
    /// How far it is.
    pub state: SizeState,
    /// Why it goes no further, in words; null: nothing is in the way.
    pub stopped_by: Option<String>,
    /// Memory that can be plugged, by device.
    pub devices: Vec<MemoryDeviceStatus>,
}

/// A virtio-mem device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct MemoryDeviceStatus {
    /// The guest's NUMA node that its memory is of.
    pub node: u32,
    /// Plugged.
    pub plugged_bytes: u64,
    /// What the guest is asked to plug.
    pub requested_bytes: u64,
    /// The most that can be.
    pub max_bytes: u64,
    /// It is plugged in pieces of this size.
    pub block_bytes: u64,
    /// Whether the guest drives it.
    pub driver: DriverState,
    /// Who serves it.
    pub served_by: DeviceServer,
    /// Touches of what is not plugged; none: QEMU does not tell.
    pub violations: Option<u64>,
}
