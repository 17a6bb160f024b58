//! By what a VM is brought to a size.
//!
//! A VM's *size* is what its guest may have of it: what it began with, and what was plugged,
//! less what a balloon holds and less what was taken in a shared allocator.
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
//! So what each mechanism is to have done follows from the size wished for, whatever was
//! wished before.

mod plan;
mod spread;

pub use plan::{Plan, plan};

use ebb_units::Bytes;

/// By what a size can change.
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

/// Whether the guest drives a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Driver {
    /// It does.
    Ready,
    /// It does not, or not yet.
    Absent,
    /// The VMM does not tell.
    Unknown,
}

/// A virtio-mem device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Device {
    /// The guest's NUMA node that its memory is of.
    pub node: u32,
    /// What the guest has plugged.
    pub plugged_bytes: u64,
    /// What it is to plug.
    pub requested_bytes: u64,
    /// The most that can be.
    pub max_bytes: u64,
    /// It does so in pieces of this size; never 0.
    pub block_bytes: u64,
    /// Whether anybody does.
    pub driver: Driver,
}

/// A balloon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Balloon {
    /// What it holds.
    pub ballooned_bytes: u64,
    /// Whether the guest fills it.
    pub driver: Driver,
}

/// What a VM offers to change its size by, as it is now.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Offer {
    /// What the VM began with.
    pub initial_bytes: u64,
    /// The same by NUMA node; never empty.
    pub node_bytes: Vec<u64>,
    /// Its virtio-mem devices.
    pub devices: Vec<Device>,
    /// Its balloon.
    pub balloon: Option<Balloon>,
    /// What was taken for good from a guest that shares its allocator; none: it does not.
    pub hard_bytes: Option<u64>,
}

/// The page size: nothing is ballooned in smaller pieces.
const PAGE_BYTES: u64 = 4096;

impl Offer {
    /// What is plugged in all.
    pub fn plugged_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.plugged_bytes).sum()
    }

    /// What the balloon holds.
    pub fn ballooned_bytes(&self) -> u64 {
        self.balloon.map_or(0, |balloon| balloon.ballooned_bytes)
    }

    /// The VM's size.
    pub fn size_bytes(&self) -> u64 {
        (self.initial_bytes + self.plugged_bytes())
            .saturating_sub(self.ballooned_bytes() + self.hard_bytes.unwrap_or(0))
    }

    /// Its size at most.
    pub fn max_bytes(&self) -> u64 {
        self.initial_bytes + self.devices.iter().map(|device| device.max_bytes).sum::<u64>()
    }

    /// The size of one node: a balloon and HyperAlloc know no nodes, so what they took is
    /// not counted. `None`: there is no such node.
    pub fn node_size_bytes(&self, node: u32) -> Option<u64> {
        let initial = *self.node_bytes.get(usize::try_from(node).ok()?)?;
        Some(initial + self.on(node).map(|device| device.plugged_bytes).sum::<u64>())
    }

    /// What a wish is about: the size of its node, or of all.
    pub fn size_of(&self, wish: &Wish) -> u64 {
        match wish.node {
            Some(node) => self.node_size_bytes(node).unwrap_or(0),
            None => self.size_bytes(),
        }
    }

    /// The devices on a node.
    pub fn on(&self, node: u32) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(move |device| device.node == node)
    }

    /// The largest block of the devices; 1 without any.
    pub fn block_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.block_bytes).max().unwrap_or(1)
    }
}

/// The size that somebody wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The VM's size, or the node's.
    pub bytes: u64,
    /// Of this NUMA node alone.
    pub node: Option<u32>,
    /// By this and nothing else.
    pub by: Option<Mechanism>,
}

/// Why a size cannot be had. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// No such node.
    #[error("there is no NUMA node {node}: the VM has {count}, counted from 0")]
    NoNode {
        /// The node asked for.
        node: u32,
        /// How many there are.
        count: usize,
    },
    /// Nothing to plug there.
    #[error(
        "NUMA node {0} has no virtio-mem device, and nothing else knows of nodes: start the VM \
         with --grow-to"
    )]
    NoDeviceOn(u32),
    /// Only virtio-mem knows nodes.
    #[error("{} knows no NUMA nodes: leave out --node, or --by", .0.name())]
    KnowsNoNodes(Mechanism),
    /// The VM does not have it.
    #[error("{}", lacks(.0))]
    Lacks(Mechanism),
    /// Nobody in the guest drives it.
    #[error(
        "the guest does not drive its {}: it needs the driver {}, loaded",
        device(.0), driver(.0)
    )]
    DriverAbsent(Mechanism),
    /// More than there can be.
    #[error("a size of {} is over the maximum of {}{}", Bytes(*.bytes), Bytes(*.max), hint(*.grows))]
    TooLarge {
        /// Asked for.
        bytes: u64,
        /// At most.
        max: u64,
        /// There is a device that could be larger.
        grows: bool,
    },
    /// Less than what takes part can take away.
    #[error("a size of {} is under what {} can reach, {}", Bytes(*.bytes), .by.name(), Bytes(*.min))]
    TooSmall {
        /// Asked for.
        bytes: u64,
        /// At least.
        min: u64,
        /// By what.
        by: Mechanism,
    },
    /// Less than the kernel itself needs.
    #[error(
        "a size of {} is below what keeps this guest alive: give {} or more",
        Bytes(*.bytes), Bytes(*.floor)
    )]
    BelowFloor {
        /// Asked for.
        bytes: u64,
        /// At least.
        floor: u64,
    },
    /// Between two blocks.
    #[error(
        "{bytes} bytes lie between two sizes: {} changes the size by {} at a time; give {below} or \
         {}",
        .by.name(), Bytes(*.block), below + block
    )]
    NotWhole {
        /// Asked for.
        bytes: u64,
        /// The next size below.
        below: u64,
        /// From there to the next one above.
        block: u64,
        /// By what.
        by: Mechanism,
    },
    /// Smaller than at the beginning, and nothing to take it with.
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
