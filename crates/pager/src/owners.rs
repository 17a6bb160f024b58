//! Which frame's content is in a slot: what to read ahead with its neighbour.

use std::sync::atomic::Ordering::Relaxed;

use ebb_units::Gfn;

use crate::sparse::Sparse;

/// A hint for each slot; the ledger's word is the truth.
pub(crate) struct Owners(Sparse);

impl Owners {
    pub(crate) fn new(slots: u64) -> Owners {
        Owners(Sparse::new(slots))
    }

    pub(crate) fn set(&self, slot: u64, gfn: Gfn) {
        if let (Some(place), Ok(gfn)) = (self.0.make(slot), u32::try_from(gfn.0)) {
            place.store(gfn, Relaxed);
        }
    }

    /// The frame that was last put there.
    pub(crate) fn get(&self, slot: u64) -> Option<Gfn> {
        Some(Gfn(u64::from(self.0.get(slot)?.load(Relaxed))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_what_was_set() {
        let owners = Owners::new(2000);
        owners.set(1024, Gfn(7));
        owners.set(1 << 30, Gfn(8));
        assert_eq!(owners.get(1024), Some(Gfn(7)));
        assert_eq!(owners.get(0), None);
        assert_eq!(owners.get(1 << 30), None);
    }
}
