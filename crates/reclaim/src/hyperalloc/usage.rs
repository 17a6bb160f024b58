//! How well the guest keeps its frames together: huge frames in use against frames in use.

use std::sync::atomic::Ordering::Relaxed;

use ebb_llfree::layout::{
    AREA_ALLOCATED, AREA_FRAMES, AREA_FREE_MASK, AREA_ROWS, KIND_HUGE, KIND_MOVABLE,
    SLOT_CLAIMS_MASK, SLOT_ROW_SHIFT, SLOT_WORDS, TREE_KIND_MASK, TREE_KIND_SHIFT,
};
use ebb_units::{FRAME_BYTES, FrameRange, HUGE_BYTES};

use super::zone::Zone;
use super::{HyperAlloc, State};

/// Usage of one kind of memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct KindUsage {
    /// Bytes of the huge frames of which at least one frame is in use.
    pub huge_bytes: u64,
    /// Bytes of the frames in use.
    pub used_bytes: u64,
}

/// Usage of each kind. The kind is what a tree was first taken for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AllocatorUsage {
    /// The kernel's own memory, which cannot be moved.
    pub unmovable: KindUsage,
    /// Memory of processes, and page cache.
    pub movable: KindUsage,
    /// Blocks of 2 MiB and more.
    pub huge: KindUsage,
}

impl AllocatorUsage {
    /// Bytes of frames in use, of any kind.
    pub fn used_bytes(&self) -> u64 {
        self.unmovable.used_bytes + self.movable.used_bytes + self.huge.used_bytes
    }
}

impl HyperAlloc {
    /// Number of shared zones.
    pub fn zone_count(&self) -> u64 {
        self.zones.len() as u64
    }

    /// What is in use at this moment, about. Frames that slots have claimed and not handed out
    /// count as free, as far as they can be distinguished.
    pub fn usage(&self) -> AllocatorUsage {
        let mut usage = AllocatorUsage::default();
        for zone in &self.zones {
            let claims = self.claims(zone);
            for index in 0..zone.areas() {
                self.add_area(zone, index, claims.get(index).copied().unwrap_or(0), &mut usage);
            }
        }
        usage
    }

    fn add_area(&self, zone: &Zone, index: usize, claims: u64, usage: &mut AllocatorUsage) {
        let is_ram = self.ram.range(FrameRange::huge(zone.huge(index))).is_some();
        if !is_ram || zone.states.get(index) == State::Hard {
            return;
        }
        let word = zone.area(&self.ram, index).unwrap_or(0);
        let free = match word & AREA_ALLOCATED {
            0 => (u64::from(word & AREA_FREE_MASK) + claims).min(AREA_FRAMES),
            _ => 0,
        };
        let tree = zone.tree_of(&self.ram, index).unwrap_or(0);
        let kind = match (tree & TREE_KIND_MASK) >> TREE_KIND_SHIFT {
            KIND_HUGE => &mut usage.huge,
            KIND_MOVABLE => &mut usage.movable,
            _ => &mut usage.unmovable,
        };
        if free < AREA_FRAMES {
            kind.huge_bytes += HUGE_BYTES;
            kind.used_bytes += (AREA_FRAMES - free) * FRAME_BYTES;
        }
    }

    /// Frames that slots have claimed, for each area.
    fn claims(&self, zone: &Zone) -> Vec<u64> {
        let mut claims = vec![0; zone.areas()];
        for slot in zone.slots(&self.ram).chunks(SLOT_WORDS).filter_map(<[_]>::first) {
            let slot = slot.load(Relaxed);
            let area = (slot >> SLOT_ROW_SHIFT) as usize / AREA_ROWS;
            if let Some(claims) = claims.get_mut(area) {
                *claims += slot & SLOT_CLAIMS_MASK;
            }
        }
        claims
    }
}
