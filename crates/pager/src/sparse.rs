//! A number for each frame or slot, of which few are ever set.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Release;

const PART: usize = 1024;

/// Zeros, in parts that take memory once they are needed.
pub(crate) struct Sparse {
    parts: Vec<OnceLock<Box<[AtomicU32; PART]>>>,
}

impl Sparse {
    pub(crate) fn new(count: u64) -> Sparse {
        Sparse { parts: (0..count.div_ceil(PART as u64)).map(|_| OnceLock::new()).collect() }
    }

    /// All are zero from now on.
    pub(crate) fn clear(&self) {
        let parts = self.parts.iter().filter_map(OnceLock::get);
        parts.flat_map(|part| part.iter()).for_each(|number| number.store(0, Release));
    }

    /// The number, if it may be anything but zero.
    pub(crate) fn get(&self, index: u64) -> Option<&AtomicU32> {
        let part = self.parts.get(usize::try_from(index).ok()? / PART)?.get()?;
        part.get(index as usize % PART)
    }

    /// The number, to be set; `None`: beyond the end.
    pub(crate) fn make(&self, index: u64) -> Option<&AtomicU32> {
        let part = self.parts.get(usize::try_from(index).ok()? / PART)?;
        let part = part.get_or_init(|| Box::new([const { AtomicU32::new(0) }; PART]));
        part.get(index as usize % PART)
    }
}
