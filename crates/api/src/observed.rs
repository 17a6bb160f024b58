//! What is known of VMs without touching them: `ebb discover` and `ebb observe`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A QEMU that runs on the host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiscoveredVm {
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
    /// The name under which Ebb manages it; null: Ebb does not.
    pub managed_as: Option<String>,
    /// Why it cannot be managed as it is, and what to do; null: it can, as far as can be seen.
    pub obstacle: Option<String>,
}

/// What one look at a VM found.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ObservedVm {
    /// QEMU's process number.
    pub pid: i32,
    /// The VM's name by its command line; null: it has none.
    pub name: Option<String>,
    /// The VM's RAM without what is plugged; null: it was not found.
    pub memory_bytes: Option<u64>,
    /// The part of it that takes host memory; null: the RAM was not found.
    pub resident_bytes: Option<u64>,
    /// What the guest uses; null: not known.
    pub usage: Option<GuestUsage>,
    /// Why something is not known; null: all is.
    pub reason: Option<String>,
}

/// What a guest uses its memory for, as its kernel counts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct GuestUsage {
    /// The kernel's release, as `uname -r` prints it.
    pub release: String,
    /// All memory that the kernel manages: meminfo's MemTotal.
    pub total_bytes: u64,
    /// Memory in use that is no page cache: `total_bytes` less `cache_bytes` and `free_bytes`.
    pub used_bytes: u64,
    /// The part of `used_bytes` that is mapped anonymous memory: AnonPages.
    pub anonymous_bytes: u64,
    /// The part of `used_bytes` that is kernel objects: Slab.
    pub slab_bytes: u64,
    /// Page cache with buffers and shared memory: Cached, Buffers and SwapCached.
    pub cache_bytes: u64,
    /// The part of `cache_bytes` that was not used for long: Inactive(file).
    pub cold_cache_bytes: u64,
    /// Free memory: MemFree.
    pub free_bytes: u64,
    /// The part of `free_bytes` that Ebb would give back now: blocks of 2 MiB and more without the
    /// reserve of 64 MiB, as far as they take host memory.
    pub reclaimable_bytes: u64,
}
