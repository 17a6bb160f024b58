//! Which frame's content is in a slot: what to read ahead with its neighbour.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use ebb_units::Gfn;

const PART: usize = 1024;

/// A hint for each slot; the ledger's word is the truth.
pub(crate) struct Owners {
    /// Frame numbers, in parts that are made when first needed.
    parts: Vec<OnceLock<Box<[AtomicU32; PART]>>>,
}

impl Owners {
    pub(crate) fn new(slots: u64) -> Owners {
        let parts = slots.div_ceil(PART as u64);
        Owners { parts: (0..parts).map(|_| OnceLock::new()).collect() }
    }

    pub(crate) fn set(&self, slot: u64, gfn: Gfn) {
        let (part, index) = (slot / PART as u64, slot as usize % PART);
        if let (Some(part), Ok(gfn)) = (self.parts.get(part as usize), u32::try_from(gfn.0)) {
            let frames = part.get_or_init(|| Box::new([const { AtomicU32::new(0) }; PART]));
            frames[index].store(gfn, Relaxed);
        }
    }

    /// The frame that was last put there.
    pub(crate) fn get(&self, slot: u64) -> Option<Gfn> {
        let frames = self.parts.get((slot / PART as u64) as usize)?.get()?;
        Some(Gfn(u64::from(frames[slot as usize % PART].load(Relaxed))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_what_was_set() {
        let owners = Owners::new(PART as u64 + 1);
        owners.set(PART as u64, Gfn(7));
        owners.set(PART as u64 * 9, Gfn(8));
        assert_eq!(owners.get(PART as u64), Some(Gfn(7)));
        assert_eq!(owners.get(0), None);
        assert_eq!(owners.get(PART as u64 * 9), None);
    }
}
