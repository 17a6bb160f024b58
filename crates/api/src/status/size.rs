//! A VM's size, and the devices that change it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{DeviceServer, DriverState, SizeMechanism, SizeState};

/// The size of a VM: what its guest may use.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SizeStatus {
    /// The size: `initial_bytes + plugged_bytes - ballooned_bytes - hard_bytes`.
    pub bytes: u64,
    /// What the VM began with.
    pub initial_bytes: u64,
    /// Plugged beyond that (virtio-mem).
    pub plugged_bytes: u64,
    /// In the balloon.
    pub ballooned_bytes: u64,
    /// Hard-reclaimed by HyperAlloc.
    pub hard_bytes: u64,
    /// The largest possible size.
    pub max_bytes: u64,
    /// The target, of `wanted_node` if that is not null; null: no target.
    pub wanted_bytes: Option<u64>,
    /// NUMA node of the target; null: the whole VM.
    pub wanted_node: Option<u32>,
    /// The mechanism for the target; null: no target.
    pub mechanism: Option<SizeMechanism>,
    /// Why this mechanism; null: no target.
    pub reason: Option<String>,
    /// Progress to the target.
    pub state: SizeState,
    /// The blocked reason, in words; null: nothing blocks.
    pub stopped_by: Option<String>,
    /// The virtio-mem devices.
    pub devices: Vec<MemoryDeviceStatus>,
}

/// A virtio-mem device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct MemoryDeviceStatus {
    /// The guest's NUMA node to which the memory belongs.
    pub node: u32,
    /// Plugged memory.
    pub plugged_bytes: u64,
    /// What the guest is asked to plug.
    pub requested_bytes: u64,
    /// The most that the guest can plug.
    pub max_bytes: u64,
    /// The unit of plugging.
    pub block_bytes: u64,
    /// Whether the guest drives the device.
    pub driver: DriverState,
    /// Who serves the device.
    pub served_by: DeviceServer,
    /// Touches of unplugged memory; null: QEMU serves the device, and does not tell.
    pub violations: Option<u64>,
}
