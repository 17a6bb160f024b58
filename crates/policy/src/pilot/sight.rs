//! A VM as the pilot sees it.

use super::rule::{HostRule, VmRule};
use crate::need::MemoryFigures;
use crate::pressure::HostMemory;

/// The swap files may take this part of their quota less before they count as full no more.
const ROOM_PART: u64 = 16;

/// The host at one moment.
#[derive(Clone, Copy, Debug)]
pub struct HostSight<'a> {
    /// Its memory.
    pub memory: &'a HostMemory,
    /// What all swap files take on their disk.
    pub swap_bytes: u64,
}

impl<'a> From<&'a HostMemory> for HostSight<'a> {
    /// A host whose swap files are empty.
    fn from(memory: &'a HostMemory) -> HostSight<'a> {
        HostSight { memory, swap_bytes: 0 }
    }
}

impl HostSight<'_> {
    /// Whether nothing more is to be written to the swap files. `was_full`: the same before.
    pub(super) fn is_full(&self, rule: HostRule, was_full: bool) -> bool {
        let room = |most: u64| if was_full { most / ROOM_PART } else { 0 };
        rule.swap_max_bytes.is_some_and(|most| self.swap_bytes >= most - room(most))
    }
}

/// Compressed memory of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompressedSight {
    /// Memory that compressed pages take; a part of what is resident.
    pub bytes: u64,
    /// The most that they may take.
    pub most_bytes: u64,
    /// The most that they may take without the pilot.
    pub own_bytes: u64,
}

/// Memory that a guest has plugged, and can unplug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PluggedSight {
    /// What is plugged.
    pub bytes: u64,
    /// What is to be plugged.
    pub asked_bytes: u64,
    /// What was to be plugged before the pilot had the guest unplug any.
    pub full_bytes: u64,
    /// What is plugged or unplugged at a time.
    pub block_bytes: u64,
    /// Whether the guest can be asked to unplug some now.
    pub may_unplug: bool,
}

impl PluggedSight {
    /// So many bytes, down to whole blocks.
    pub(super) fn whole(&self, bytes: u64) -> u64 {
        bytes - bytes % self.block_bytes.max(1)
    }

    /// Whether more is to be plugged than is.
    pub(super) fn is_coming(&self) -> bool {
        self.bytes < self.asked_bytes
    }
}

/// A VM at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VmSight {
    /// Its name.
    pub name: String,
    /// Its settings.
    pub rule: VmRule,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Host memory that it takes.
    pub resident_bytes: u64,
    /// Resident memory without which its guest does not live.
    pub floor_bytes: u64,
    /// The limit that the pilot has given it. `None`: none.
    pub limit_bytes: Option<u64>,
    /// Free memory of its guest that is resident at least.
    pub spare_bytes: u64,
    /// What it works with, its kernel included. `None`: not known.
    pub working_bytes: Option<u64>,
    /// Evicted memory that came back within seconds, or while it was at its limit, in all.
    pub refaulted_bytes: u64,
    /// Its compressed memory. `None`: it can have none.
    pub compressed: Option<CompressedSight>,
    /// What its guest says of its own memory. `None`: nothing lately.
    pub guest: Option<MemoryFigures>,
    /// Memory that its guest has plugged. `None`: it can unplug none, or that is not known now.
    pub plugged: Option<PluggedSight>,
    /// Whether its guest waits for room below the limit.
    pub waits: bool,
    /// Whether free memory can be reclaimed from it now.
    pub may_reclaim: bool,
    /// Whether it can have a limit now.
    pub may_limit: bool,
}

impl VmSight {
    /// The least that its limit may be.
    pub(super) fn least_bytes(&self) -> u64 {
        self.rule.min_bytes.unwrap_or(0).max(self.floor_bytes).min(self.memory_bytes)
    }

    /// The most that it may have.
    pub(super) fn most_bytes(&self) -> u64 {
        let most = self.rule.max_bytes.unwrap_or(self.memory_bytes).min(self.memory_bytes);
        most.max(self.least_bytes())
    }

    /// What it has, by its limit or by what is resident, if that is less.
    pub(super) fn has_bytes(&self) -> u64 {
        self.limit_bytes.unwrap_or(u64::MAX).min(self.resident_bytes)
    }

    /// What it is to give yet: what it takes above its limit, or what compressed pages take above
    /// theirs.
    pub(super) fn excess_bytes(&self) -> u64 {
        let resident =
            self.limit_bytes.map_or(0, |limit| self.resident_bytes.saturating_sub(limit));
        let above = |it: CompressedSight| it.bytes.saturating_sub(it.most_bytes);
        resident.max(self.compressed.map_or(0, above))
    }

    /// What its guest says, if it is about to run out of memory.
    pub(super) fn pressed(&self) -> Option<MemoryFigures> {
        self.guest.filter(MemoryFigures::is_pressed)
    }

    /// What its guest has plugged, if the pilot has had it unplug some. Whoever waits for room can
    /// plug nothing.
    pub(super) fn unplugged(&self) -> Option<PluggedSight> {
        self.plugged.filter(|it| it.asked_bytes < it.full_bytes && !self.waits)
    }

    /// Memory that compressed pages take and may keep.
    pub(super) fn compressed_bytes(&self) -> u64 {
        self.compressed.map_or(0, |it| it.bytes.min(it.most_bytes))
    }

    /// What compressed pages may take without the pilot, if that is more than now.
    pub(super) fn lacks_compressed(&self) -> Option<CompressedSight> {
        self.compressed.filter(|it| it.most_bytes < it.own_bytes)
    }

    /// Whether its limit may be lowered at all.
    pub(super) fn may_give(&self) -> bool {
        self.may_limit && !self.rule.is_held
    }

    /// What it has beside what it works with, and some slack.
    pub(super) fn cold_bytes(&self, working: u64) -> u64 {
        let slack = working / self.rule.class.slack_part();
        self.has_bytes().saturating_sub(working.saturating_add(slack))
    }

    /// What may be taken from it at most.
    pub(super) fn warm_bytes(&self) -> u64 {
        self.has_bytes().saturating_sub(self.least_bytes())
    }
}
