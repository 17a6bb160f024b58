//! Which frame's content is in a slot: says what to read ahead with its neighbour.

use std::sync::atomic::Ordering::Relaxed;

use ebb_store::{MEMORY_SLOTS, StoreUsage};
use ebb_units::Gfn;

use crate::support::sparse::Sparse;

/// A hint for each slot; the ledger's word is the truth.
pub(crate) struct Owners {
    on_disk: Sparse,
    in_memory: Sparse,
}

impl Owners {
    /// Makes owners for a store of this size.
    pub(crate) fn new(usage: StoreUsage) -> Owners {
        Owners {
            on_disk: Sparse::new(usage.disk_slots),
            in_memory: Sparse::new(usage.memory_slots),
        }
    }

    pub(crate) fn set(&self, slot: u64, gfn: Gfn) {
        let (part, index) = self.part(slot);
        if let (Some(place), Ok(gfn)) = (part.make(index), u32::try_from(gfn.0)) {
            place.store(gfn, Relaxed);
        }
    }

    /// Returns the frame whose content was last put there.
    pub(crate) fn get(&self, slot: u64) -> Option<Gfn> {
        let (part, index) = self.part(slot);
        Some(Gfn(u64::from(part.get(index)?.load(Relaxed))))
    }

    fn part(&self, slot: u64) -> (&Sparse, u64) {
        match slot.checked_sub(MEMORY_SLOTS) {
            Some(index) => (&self.in_memory, index),
            None => (&self.on_disk, slot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_what_was_set() {
        let usage = StoreUsage { disk_slots: 2000, memory_slots: 256, ..StoreUsage::default() };
        let owners = Owners::new(usage);
        owners.set(MEMORY_SLOTS + 255, Gfn(9));
        assert_eq!(owners.get(MEMORY_SLOTS + 255), Some(Gfn(9)));
        assert_eq!(owners.get(255), None);
        owners.set(MEMORY_SLOTS | 1 << 46, Gfn(9));
        assert_eq!(owners.get(MEMORY_SLOTS | 1 << 46), None);
        owners.set(1024, Gfn(7));
        owners.set(1 << 30, Gfn(8));
        assert_eq!(owners.get(1024), Some(Gfn(7)));
        assert_eq!(owners.get(0), None);
        assert_eq!(owners.get(1 << 30), None);
    }
}
