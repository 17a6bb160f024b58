//! By what a VM comes to a size.
//!
//! A VM's *size* is what its guest may have: what the VM began with, plus what was plugged, less
//! what a balloon holds, and less what was hard-reclaimed from a shared allocator.
//!
//! ```text
//!          0                         initial                       maximum
//!          +---------------------------+-----------------------------+
//! smaller  | taken by HyperAlloc, else |                             |
//!          | by the balloon            |                             |
//!          +---------------------------+-----------------------------+
//! larger   | all                       | plugged by virtio-mem       |
//!          +---------------------------+-----------------------------+
//! ```
//!
//! So the target size alone says what each mechanism has to do, whatever the target was before.

mod plan;
mod spread;

pub use plan::{Plan, plan};
pub use spread::spread;

use ebb_units::Bytes;

/// What can change a size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mechanism {
    /// The guest's page-frame allocator, which the host shares.
    HyperAlloc,
    /// A driver in the guest that allocates memory and leaves it to the host.
    Balloon,
    /// Blocks that are plugged and unplugged, beyond what the VM began with.
    VirtioMem,
}

impl Mechanism {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::HyperAlloc => "HyperAlloc",
            Mechanism::Balloon => "the balloon",
            Mechanism::VirtioMem => "virtio-mem",
        }
    }
}

/// Whether the guest has a driver for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Driver {
    /// It has one.
    Ready,
    /// It has none, or none yet.
    Absent,
    /// The VMM does not tell.
    Unknown,
}

/// The part of a virtio-mem device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DevicePart {
    /// The guest's NUMA node of its memory.
    pub node: u32,
    /// Bytes that the guest has plugged.
    pub plugged_bytes: u64,
    /// Bytes that the guest is to plug.
    pub requested_bytes: u64,
    /// The most bytes that can be plugged.
    pub max_bytes: u64,
    /// Bytes plugged or unplugged at a time; never 0.
    pub block_bytes: u64,
    /// Whether the guest drives it.
    pub driver: Driver,
}

/// The part of a balloon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BalloonPart {
    /// Bytes that it holds.
    pub ballooned_bytes: u64,
    /// Whether the guest fills it.
    pub driver: Driver,
}

/// The parts of a VM's size now, by which it can change.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct SizeParts {
    /// Bytes that the VM began with.
    pub initial_bytes: u64,
    /// Bytes that the VM began with, by NUMA node; never empty.
    pub node_bytes: Vec<u64>,
    /// Its virtio-mem devices.
    pub devices: Vec<DevicePart>,
    /// Its balloon.
    pub balloon: Option<BalloonPart>,
    /// Bytes hard-reclaimed from a guest that shares its allocator. `None`: it shares none.
    pub hard_bytes: Option<u64>,
}

/// The page size: nothing is ballooned in smaller pieces.
const PAGE_BYTES: u64 = 4096;

impl SizeParts {
    /// Bytes plugged on all devices.
    pub fn plugged_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.plugged_bytes).sum()
    }

    /// Bytes that the balloon holds.
    pub fn ballooned_bytes(&self) -> u64 {
        self.balloon.map_or(0, |balloon| balloon.ballooned_bytes)
    }

    /// The VM's size in bytes.
    pub fn size_bytes(&self) -> u64 {
        (self.initial_bytes + self.plugged_bytes())
            .saturating_sub(self.ballooned_bytes() + self.hard_bytes.unwrap_or(0))
    }

    /// The largest size that the VM can have, in bytes.
    pub fn max_bytes(&self) -> u64 {
        self.initial_bytes + self.devices.iter().map(|device| device.max_bytes).sum::<u64>()
    }

    /// The size of one node in bytes. A balloon and HyperAlloc know no nodes, so what they hold is
    /// not subtracted. `None`: there is no such node.
    pub fn node_size_bytes(&self, node: u32) -> Option<u64> {
        let initial = *self.node_bytes.get(usize::try_from(node).ok()?)?;
        Some(initial + self.on(node).map(|device| device.plugged_bytes).sum::<u64>())
    }

    /// The current size that a target is about: of its node, or of the whole VM.
    pub fn size_of(&self, target: &SizeTarget) -> u64 {
        match target.node {
            Some(node) => self.node_size_bytes(node).unwrap_or(0),
            None => self.size_bytes(),
        }
    }

    /// The devices on a node.
    pub fn on(&self, node: u32) -> impl Iterator<Item = &DevicePart> {
        self.devices.iter().filter(move |device| device.node == node)
    }

    /// The largest block size of the devices; 1 without any.
    pub fn block_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.block_bytes).max().unwrap_or(1)
    }
}

/// A target size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SizeTarget {
    /// The size of the VM, or of the node.
    pub bytes: u64,
    /// The NUMA node that is resized; `None`: the whole VM.
    pub node: Option<u32>,
    /// The only mechanism to use; `None`: any.
    pub by: Option<Mechanism>,
}

/// Why a size cannot be had. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SizeRefusal {
    /// There is no such node.
    #[error("there is no NUMA node {node}: the VM has {count}, counted from 0")]
    NoNode {
        /// The node asked for.
        node: u32,
        /// How many nodes there are.
        count: usize,
    },
    /// The node has no device that can plug.
    #[error(
        "NUMA node {0} has no virtio-mem device, and nothing else knows of nodes: start the VM \
         with --grow-to"
    )]
    NoDeviceOn(u32),
    /// Only virtio-mem knows nodes.
    #[error("{} knows no NUMA nodes: leave out --node, or --by", .0.name())]
    KnowsNoNodes(Mechanism),
    /// The VM does not have the mechanism.
    #[error("{}", lacks(.0))]
    Lacks(Mechanism),
    /// The guest does not drive the device.
    #[error(
        "the guest does not drive its {}: it needs the driver {}, loaded",
        device(.0), driver(.0)
    )]
    DriverAbsent(Mechanism),
    /// More than the maximum.
    #[error("a size of {} is over the maximum of {}{}", Bytes(*.bytes), Bytes(*.max), hint(*.grows))]
    TooLarge {
        /// The size asked for.
        bytes: u64,
        /// The maximum.
        max: u64,
        /// Whether the VM can already grow, so that no hint is needed.
        grows: bool,
    },
    /// Less than the mechanism can reach.
    #[error(
        "a size of {} is below the least that {} can reach, {}",
        Bytes(*.bytes), .by.name(), Bytes(*.min)
    )]
    TooSmall {
        /// The size asked for.
        bytes: u64,
        /// The least that can be reached.
        min: u64,
        /// The mechanism.
        by: Mechanism,
    },
    /// Less than the guest's kernel itself needs.
    #[error(
        "a size of {} is below what keeps this guest alive: give {} or more",
        Bytes(*.bytes), Bytes(*.floor)
    )]
    BelowFloor {
        /// The size asked for.
        bytes: u64,
        /// The least size.
        floor: u64,
    },
    /// Between two sizes that the mechanism can reach.
    #[error(
        "{bytes} bytes lie between two sizes: {} changes the size by {} at a time; give {below} or \
         {}",
        .by.name(), Bytes(*.block), below + block
    )]
    NotWhole {
        /// The size asked for.
        bytes: u64,
        /// The next possible size below.
        below: u64,
        /// Distance from there to the next possible size above.
        block: u64,
        /// The mechanism.
        by: Mechanism,
    },
    /// Less than the VM began with, and it has nothing that takes memory from its guest.
    #[error(
        "the VM cannot have less than the {} it began with: it has no balloon, and its kernel \
         shares no allocator",
        Bytes(*.0)
    )]
    NothingTakes(u64),
}

fn device(mechanism: &Mechanism) -> &'static str {
    if *mechanism == Mechanism::Balloon { "balloon" } else { "virtio-mem device" }
}

fn driver(mechanism: &Mechanism) -> &'static str {
    if *mechanism == Mechanism::Balloon { "virtio_balloon" } else { "virtio_mem" }
}

fn lacks(mechanism: &Mechanism) -> &'static str {
    match mechanism {
        Mechanism::HyperAlloc => {
            "the guest's kernel does not share its allocator: HyperAlloc \
                                  needs one with LLFree"
        }
        Mechanism::Balloon => "the VM has no balloon: it needs -device virtio-balloon-pci",
        Mechanism::VirtioMem => "the VM has no virtio-mem device: start it with --grow-to",
    }
}

fn hint(grows: bool) -> &'static str {
    if grows { "" } else { ": start the VM with --grow-to for more" }
}
