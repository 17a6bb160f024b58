//! One entry of an x86-64 page table (Intel SDM volume 3, section 4.5).

use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gpa};

use crate::Access;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// Above the lowest level: the entry is a leaf.
const LARGE: u64 = 1 << 7;
/// The physical address: bits 12 to 51.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// An entry as it was read. Levels count from 0: the table whose entries map frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry(pub u64);

impl Entry {
    /// Whether it maps something for programs.
    pub fn is_mapped(self) -> bool {
        self.0 & (PRESENT | USER) == PRESENT | USER
    }

    /// Whether a translation went through it since this bit was last cleared.
    pub fn is_accessed(self) -> bool {
        self.is_mapped() && self.0 & ACCESSED != 0
    }

    /// The same entry with only its accessed bit cleared.
    pub fn cleared(self) -> Entry {
        Entry(self.0 & !ACCESSED)
    }

    /// How its pages were used. A leaf that is dirty and writable may have been written in this
    /// window. One that is clean, or not writable now, was not written.
    pub fn access(self) -> Access {
        match self.0 & (DIRTY | WRITABLE) == DIRTY | WRITABLE {
            true => Access::Write,
            false => Access::Read,
        }
    }

    /// The frames that it maps, if it is a leaf at this level.
    pub fn leaf(self, level: u32) -> Option<FrameRange> {
        let frames = match level {
            0 => 1,
            1 | 2 if self.0 & LARGE != 0 => FRAMES_PER_HUGE.pow(level),
            _ => return None,
        };
        // In a large leaf, address bits below its own size hold a flag.
        let base = (self.0 & ADDRESS) & !(frames * FRAME_BYTES - 1);
        Some(FrameRange::new(Gpa(base).gfn(), frames))
    }

    /// The table that it leads to, if it is not a leaf at this level.
    pub fn table(self, level: u32) -> Option<ebb_units::Gfn> {
        let is_leaf = self.leaf(level).is_some();
        (!is_leaf && self.is_mapped()).then(|| Gpa(self.0 & ADDRESS).gfn())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_units::Gfn;

    #[test]
    fn only_the_accessed_bit_is_cleared() {
        for bits in [u64::MAX, ACCESSED | PRESENT | DIRTY, 0x8000_0001_2345_6867] {
            assert_eq!(Entry(bits).cleared().0, bits & !(1 << 5));
        }
    }

    #[test]
    fn absent_entries_and_those_of_the_kernel_map_nothing() {
        assert!(Entry(PRESENT | USER | ACCESSED).is_accessed());
        for bits in [USER | ACCESSED, PRESENT | ACCESSED, ACCESSED, 0] {
            assert!(!Entry(bits).is_accessed(), "{bits:#x}");
            assert_eq!(Entry(bits).table(1), None);
        }
    }

    #[test]
    fn leaves_by_level() {
        let entry = Entry(0x1_4020_1000 | LARGE | PRESENT | USER);
        assert_eq!(entry.leaf(0), Some(FrameRange::new(Gfn(0x14_0201), 1)));
        assert_eq!(entry.leaf(1), Some(FrameRange::new(Gfn(0x14_0200), 512)));
        assert_eq!(entry.leaf(2), Some(FrameRange::new(Gfn(0x14_0000), 1 << 18)));
        assert_eq!(entry.leaf(3), None);
        assert_eq!(entry.table(1), None);
        assert_eq!(Entry(entry.0 & !LARGE).table(1), Some(Gfn(0x14_0201)));
    }

    #[test]
    fn written_is_dirty_and_writable() {
        assert_eq!(Entry(DIRTY | WRITABLE).access(), Access::Write);
        assert_eq!(Entry(DIRTY).access(), Access::Read);
        assert_eq!(Entry(WRITABLE).access(), Access::Read);
    }
}
