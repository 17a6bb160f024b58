//! What an operator sets: for the host, and for each VM.

use crate::pressure::Below;

/// Weight of a VM for which none was given.
pub const WEIGHT_DEFAULT: u32 = 100;

/// Compressed pages may take this part of a VM's memory while the host is tight.
pub const COMPRESSED_PART: u64 = 8;

/// The host's settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostRule {
    /// Memory that is to stay available on the host.
    pub reserve: Below,
    /// Thousandths of the time in which some task may wait for memory. `None`: waits do not count.
    pub stall_permille: Option<u32>,
    /// The most that all swap files are to take. `None`: the pilot does not mind.
    pub swap_max_bytes: Option<u64>,
}

/// How much a VM's speed matters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Class {
    /// Nobody waits for it: its memory goes first, also what it works with.
    Batch,
    /// Neither of the others.
    #[default]
    Normal,
    /// Somebody waits for each of its answers: its memory goes last and comes back first.
    Latency,
}

/// A VM's settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VmRule {
    /// Resident memory below which nothing in use is taken. `None`: what its guest needs to live.
    pub min_bytes: Option<u64>,
    /// Most resident memory. `None`: all of its memory.
    pub max_bytes: Option<u64>,
    /// Its part of what is given and kept among VMs of its class. Twice the weight gives half as
    /// much of its memory.
    pub weight: u32,
    /// How much its speed matters.
    pub class: Class,
    /// Whether the pilot leaves it as it is.
    pub is_held: bool,
}

impl Default for VmRule {
    fn default() -> VmRule {
        VmRule {
            min_bytes: None,
            max_bytes: None,
            weight: WEIGHT_DEFAULT,
            class: Class::default(),
            is_held: false,
        }
    }
}

impl Class {
    /// What a VM keeps beyond what it works with: this part of that.
    pub fn slack_part(self) -> u64 {
        match self {
            Class::Latency => 2,
            Class::Normal => 4,
            Class::Batch => 8,
        }
    }

    /// A limit that is too low is raised by this part of the VM's memory at least. More than the VM
    /// needs costs nothing while the VM does not use it.
    pub(super) fn relief_part(self) -> u64 {
        match self {
            Class::Latency => 8,
            Class::Normal => 16,
            Class::Batch => 50,
        }
    }

    /// Free memory that stays in its guest while the host has enough: this part of its memory.
    /// `None`: nothing.
    pub(super) fn kept_part(self) -> Option<u64> {
        match self {
            Class::Latency => Some(8),
            Class::Normal => Some(32),
            Class::Batch => None,
        }
    }

    /// Whether a VM's limit is too low, by the evicted memory that came back to it in a second.
    pub fn misses_memory(self, resident_bytes: u64, refaulted_bytes: u64) -> bool {
        refaulted_bytes > resident_bytes / self.refault_part()
    }

    /// Evicted memory may come back in a second up to this part of what is resident, before the
    /// limit counts as too low.
    pub(super) fn refault_part(self) -> u64 {
        match self {
            Class::Latency => 2000,
            Class::Normal => 500,
            Class::Batch => 100,
        }
    }
}
