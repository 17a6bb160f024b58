//! How much of a VM's memory may be reclaimed or evicted, given what reaches it. A device that QEMU
//! emulates reads and writes guest memory through QEMU's address space, and its fault waits for
//! memory that is non-resident. Other devices pin the memory, or map it in a process of their own.
//! `docs/devices.md` has the table.
//!
//! There are two sources: the VMM's open descriptors, which need no answer from it, and its
//! objects, for which it is asked by QMP.

mod asked;
mod migration;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::{Duration, Instant};

pub use asked::of_vmm;
pub use migration::{Migration, awaits_guest, cancel_migration, of_migration};

use crate::shown::shown;

/// Longest time of one look, after which nothing more is asked.
const LOOK: Duration = Duration::from_secs(20);
/// Longest wait for one piece of an answer.
pub(crate) const PIECE: Duration = Duration::from_secs(10);
/// Most characters of a name, because names go into messages.
const NAME_MAX: usize = 64;
/// Most devices of one VMM to name. Others are counted.
const NAMED_MAX: usize = 64;

/// What may be reclaimed or evicted, in ascending order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reach {
    /// All memory must stay where it is.
    Nothing,
    /// Free memory may be reclaimed: nobody needs its content.
    FreeOnly,
    /// Memory in use may be evicted as well: a touch waits until it is refilled.
    Everything,
}

/// What reaches the memory other than through the VMM's address space, or why the memory must stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// A passed-through device whose memory stays mapped in the host's IOMMU.
    Vfio,
    /// The same by iommufd, or an object of QEMU's with which such a device may come.
    Iommufd,
    /// A passed-through device whose memory Ebb maps and unmaps there, piece by piece.
    VfioInPieces,
    /// A virtio device in hardware, or one by VDUSE.
    Vdpa,
    /// Memory registered with an RDMA network card.
    Rdma,
    /// Memory that the host cannot read.
    Confidential,
    /// A migration that gives the memory itself to another process.
    SharedMigration,
    /// A device that another process serves.
    VhostUser,
    /// A PCI device that another process serves.
    OtherProcess,
    /// The kernel's SCSI target.
    VhostScsi,
    /// Guest memory used as buffers of the host's graphics.
    Udmabuf,
    /// The VMM does not tell.
    Unknown,
}

impl DeviceKind {
    /// How much may be reclaimed or evicted despite it.
    pub fn reach(self) -> Reach {
        match self {
            DeviceKind::Vfio
            | DeviceKind::Iommufd
            | DeviceKind::Vdpa
            | DeviceKind::Rdma
            | DeviceKind::Confidential
            | DeviceKind::SharedMigration => Reach::Nothing,
            DeviceKind::VfioInPieces
            | DeviceKind::VhostUser
            | DeviceKind::OtherProcess
            | DeviceKind::VhostScsi
            | DeviceKind::Udmabuf
            | DeviceKind::Unknown => Reach::FreeOnly,
        }
    }

    /// Why no more may be reclaimed or evicted.
    pub fn why(self) -> &'static str {
        match self {
            DeviceKind::Vfio | DeviceKind::Vdpa => {
                "its DMA needs memory that stays where it is, and Ebb does not drive its IOMMU"
            }
            DeviceKind::Iommufd => {
                "its DMA needs memory that stays where it is, and Ebb does not drive iommufd: \
                 leave out -object iommufd, and iommufd= of -device"
            }
            DeviceKind::VfioInPieces => {
                "its DMA cannot wait for memory in use; free memory is mapped before the guest may \
                 use it"
            }
            DeviceKind::Rdma => "it pins memory for the network card",
            DeviceKind::Confidential => "the host cannot read or move the memory of such a guest",
            DeviceKind::SharedMigration => {
                "it hands the memory to a process that Ebb does not manage"
            }
            DeviceKind::VhostUser | DeviceKind::OtherProcess => {
                "it is served by another process, which would find zeros where memory in use was \
                 evicted"
            }
            DeviceKind::VhostScsi => "it pins memory in use while requests are under way",
            DeviceKind::Udmabuf => "it pins the memory in use that is shown",
            DeviceKind::Unknown => "it does not say which devices the VM has",
        }
    }
}

/// Something that reaches the memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryUser {
    /// Its name in QEMU or the kernel.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
}

impl MemoryUser {
    fn new(name: &str, kind: DeviceKind) -> MemoryUser {
        MemoryUser { name: shown(name, NAME_MAX), kind }
    }

    /// Stands for the unknown devices of a VMM that does not tell which it has.
    pub fn unknown() -> MemoryUser {
        MemoryUser::new("QEMU", DeviceKind::Unknown)
    }
}

impl fmt::Display for MemoryUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.kind.why())
    }
}

/// How much may be reclaimed or evicted despite all of these devices.
pub fn reach(devices: &[MemoryUser]) -> Reach {
    devices.iter().map(|device| device.kind.reach()).min().unwrap_or(Reach::Everything)
}

/// The device that allows the least to be reclaimed or evicted. `None` if there are no devices.
pub fn narrowest(devices: &[MemoryUser]) -> Option<&MemoryUser> {
    devices.iter().min_by_key(|device| device.kind.reach())
}

/// Keeps the devices that allow the least. If there are too many, one stands for all others.
fn bounded(mut devices: Vec<MemoryUser>) -> Vec<MemoryUser> {
    if devices.len() > NAMED_MAX {
        devices.sort_by_key(|device| device.kind.reach());
        let others = devices.split_off(NAMED_MAX);
        let name = format!("{} more devices", others.len());
        devices.extend(narrowest(&others).map(|other| MemoryUser::new(&name, other.kind)));
    }
    devices
}

/// Finds devices by the VMM's open descriptors, as `/proc/PID/fd` names them. Others reach memory
/// through the VMM's address space (vhost-net, vhost-vsock) or not at all: `kvm-vfio` pins nothing,
/// and QEMU keeps it open after the last such device is removed.
pub fn of_descriptors<'a>(links: impl IntoIterator<Item = &'a str>) -> Vec<MemoryUser> {
    let mut found: Vec<MemoryUser> = Vec::new();
    for link in links {
        if let Some(kind) = of_descriptor(link)
            && found.iter().all(|device| device.kind != kind)
        {
            found.push(MemoryUser::new(link, kind));
        }
    }
    found
}

fn of_descriptor(link: &str) -> Option<DeviceKind> {
    const PATHS: [(&str, DeviceKind); 8] = [
        ("/dev/vfio/", DeviceKind::Vfio),
        ("/dev/iommu", DeviceKind::Iommufd),
        ("/dev/vhost-vdpa", DeviceKind::Vdpa),
        ("/dev/infiniband/", DeviceKind::Rdma),
        ("/dev/sev", DeviceKind::Confidential),
        ("/dev/vhost-scsi", DeviceKind::VhostScsi),
        ("/dev/udmabuf", DeviceKind::Udmabuf),
        ("anon_inode:[vfio-device]", DeviceKind::Vfio),
    ];
    let named = PATHS.iter().find(|(path, _)| link.starts_with(path)).map(|&(_, kind)| kind);
    let is_private = || link.contains("kvm-gmem") || link.contains("guest_memfd");
    named.or_else(|| is_private().then_some(DeviceKind::Confidential))
}

/// End of a look that begins now, after which nothing is asked.
pub fn end_of_look() -> Instant {
    Instant::now() + LOOK
}
