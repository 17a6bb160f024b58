//! All VMs of a host, managed or not: what `ebb observe` and `ebb discover` tell, for clients.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{GuestUsage, VmName};

/// Most VMs in one answer.
pub const HOST_VMS_MAX: usize = 1000;

/// The VMs of a host, as they were a few seconds ago at most. While a look takes long, they may be
/// a minute old.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostVms {
    /// Age of what is told, in milliseconds.
    pub age_ms: u64,
    /// VMs that are left out, because an answer has 1000 at most.
    pub left_out: u64,
    /// The VMs, by QEMU's process number.
    pub vms: Vec<HostVm>,
}

/// A VM of the host: what its guest uses, and whether Ebb manages it or could.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostVm {
    /// QEMU's process number.
    pub pid: i32,
    /// The VM's name by its command line; null: it has none.
    pub name: Option<String>,
    /// The VM's UUID by its command line; null: it has none.
    pub uuid: Option<String>,
    /// Who started it: `libvirt`, `KubeVirt`, `Proxmox VE`, `Incus` or `Kata Containers`; null: not
    /// known.
    pub manager: Option<String>,
    /// The VM's RAM without what is plugged.
    pub memory_bytes: u64,
    /// The part of it that takes host memory; null: the RAM was not found.
    pub resident_bytes: Option<u64>,
    /// What the guest uses; null: not known.
    pub usage: Option<GuestUsage>,
    /// Why something is not known; null: all is.
    pub reason: Option<String>,
    /// The name under which Ebb manages it; null: Ebb does not.
    #[schema(value_type = Option<String>)]
    pub managed_as: Option<VmName>,
    /// Why it cannot be managed as it is, and what to do; null: it can, as far as can be seen.
    pub obstacle: Option<String>,
    /// The name that `ebb attach --all` would give it; null: Ebb manages it, cannot, or has no name
    /// left for it.
    #[schema(value_type = Option<String>)]
    pub attach_as: Option<VmName>,
}
