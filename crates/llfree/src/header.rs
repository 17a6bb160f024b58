//! The header, by which the host finds a zone's state.

use crate::atomic::{Atom, AtomicU64};
use crate::error::LayoutError;
use crate::layout::{
    HEADER_AREAS, HEADER_BASE_FRAME, HEADER_BITS, HEADER_FRAMES, HEADER_MAGIC, HEADER_SLOTS,
    HEADER_TREES, HEADER_VERSION_CORES, HEADER_WORDS, MAGIC, MAX_FRAMES, VERSION,
    ZONE_ALIGN_FRAMES, check_size,
};

/// Content of a header. Addresses are guest-physical.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Number of the zone's first frame.
    pub base_frame: u64,
    /// Frames that the zone spans.
    pub frames: u64,
    /// Cores that have reservation slots of their own; 1 if all cores share the slots.
    pub cores: u32,
    /// Address of the bit field, bytes.
    pub bits: u64,
    /// Address of the areas, bytes.
    pub areas: u64,
    /// Address of the trees, bytes.
    pub trees: u64,
    /// Address of the reservation slots, bytes.
    pub slots: u64,
}

impl Header {
    /// Reads a header: each word once, trusting none. The caller checks that the addresses lie in
    /// the guest's memory.
    ///
    /// # Errors
    /// The words are no header, or a header with impossible values.
    pub fn read(words: &[AtomicU64]) -> Result<Header, LayoutError> {
        let words = words.first_chunk::<HEADER_WORDS>().ok_or(LayoutError::Short)?;
        let word = |index: usize| words[index].get();
        if word(HEADER_MAGIC) != MAGIC {
            return Err(LayoutError::Magic(word(HEADER_MAGIC)));
        }
        let version_cores = word(HEADER_VERSION_CORES);
        if version_cores as u32 != VERSION {
            return Err(LayoutError::Version(version_cores as u32));
        }
        let header = Header {
            base_frame: word(HEADER_BASE_FRAME),
            frames: word(HEADER_FRAMES),
            cores: (version_cores >> 32) as u32,
            bits: word(HEADER_BITS),
            areas: word(HEADER_AREAS),
            trees: word(HEADER_TREES),
            slots: word(HEADER_SLOTS),
        };
        header.check()?;
        Ok(header)
    }

    /// Writes the header, its magic number last: a reader that finds the magic number finds the
    /// rest.
    ///
    /// # Errors
    /// [`Header::read`] would refuse the header.
    pub fn write(&self, words: &[AtomicU64]) -> Result<(), LayoutError> {
        self.check()?;
        let words = words.first_chunk::<HEADER_WORDS>().ok_or(LayoutError::Short)?;
        words.iter().for_each(|word| word.set(0));
        words[HEADER_VERSION_CORES].set(u64::from(VERSION) | u64::from(self.cores) << 32);
        words[HEADER_BASE_FRAME].set(self.base_frame);
        words[HEADER_FRAMES].set(self.frames);
        words[HEADER_BITS].set(self.bits);
        words[HEADER_AREAS].set(self.areas);
        words[HEADER_TREES].set(self.trees);
        words[HEADER_SLOTS].set(self.slots);
        words[HEADER_MAGIC].set(MAGIC);
        Ok(())
    }

    fn check(&self) -> Result<(), LayoutError> {
        check_size(self.frames, self.cores)?;
        // The zone's end is bounded too, so that `base_frame + frames` cannot overflow.
        if !self.base_frame.is_multiple_of(ZONE_ALIGN_FRAMES) || self.base_frame > MAX_FRAMES {
            return Err(LayoutError::Base(self.base_frame));
        }
        let addresses = [self.bits, self.areas, self.trees, self.slots];
        match addresses.into_iter().find(|address| !address.is_multiple_of(64)) {
            Some(address) => Err(LayoutError::Address(address)),
            None => Ok(()),
        }
    }
}
