//! Addresses and frame numbers.

use alloc::vec::Vec;
use core::fmt;

use crate::{FRAME_BYTES, FRAMES_PER_HUGE, HUGE_BYTES};

/// A guest-physical address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gpa(pub u64);

/// A virtual address in the VMM's process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Hva(pub u64);

/// A guest frame number: `Gpa / 4096`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gfn(pub u64);

/// A huge frame's number: `Gpa / 2 MiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct HugeFrame(pub u64);

impl Gpa {
    /// The frame that holds this address.
    pub const fn gfn(self) -> Gfn {
        Gfn(self.0 / FRAME_BYTES)
    }

    /// The address `bytes` further on, or `None` past the end of the address space.
    pub const fn checked_add(self, bytes: u64) -> Option<Gpa> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Gpa(sum)),
            None => None,
        }
    }
}

impl Gfn {
    /// The frame's first address.
    ///
    /// Saturates for numbers no x86-64 guest can have (above 2^52), so that a
    /// wild number from a guest becomes an address outside RAM, not a wrapped one.
    pub const fn gpa(self) -> Gpa {
        Gpa(self.0.saturating_mul(FRAME_BYTES))
    }

    /// The huge frame that holds this frame.
    pub const fn huge(self) -> HugeFrame {
        HugeFrame(self.0 / FRAMES_PER_HUGE)
    }

    /// This frame's place inside its huge frame, `0..512`.
    pub const fn index_in_huge(self) -> usize {
        (self.0 % FRAMES_PER_HUGE) as usize
    }
}

impl HugeFrame {
    /// The huge frame's first frame.
    pub const fn first(self) -> Gfn {
        Gfn(self.0.saturating_mul(FRAMES_PER_HUGE))
    }

    /// The huge frame's first address.
    pub const fn gpa(self) -> Gpa {
        Gpa(self.0.saturating_mul(HUGE_BYTES))
    }
}

/// A run of `count` frames that begins at `start`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameRange {
    /// The first frame.
    pub start: Gfn,
    /// The number of frames.
    pub count: u64,
}

impl FrameRange {
    /// Returns a range. Its end must not pass the last frame number.
    pub const fn new(start: Gfn, count: u64) -> FrameRange {
        FrameRange { start, count }
    }

    /// The buddy block of `order` that begins at `start`.
    pub const fn block(start: Gfn, order: u8) -> FrameRange {
        FrameRange { start, count: 1 << order }
    }

    /// One whole huge frame.
    pub const fn huge(huge: HugeFrame) -> FrameRange {
        FrameRange { start: huge.first(), count: FRAMES_PER_HUGE }
    }

    /// The frame after the last.
    pub const fn end(self) -> Gfn {
        Gfn(self.start.0.saturating_add(self.count))
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.count.saturating_mul(FRAME_BYTES)
    }

    /// Whether `gfn` lies in the range.
    pub const fn contains(self, gfn: Gfn) -> bool {
        gfn.0 >= self.start.0 && gfn.0 < self.end().0
    }

    /// Every frame of the range, in order.
    pub fn frames(self) -> impl Iterator<Item = Gfn> {
        (self.start.0..self.end().0).map(Gfn)
    }

    /// Appends the range to `ranges`, which are in order: extends the last one if this range begins
    /// where that one ends.
    pub fn join(self, ranges: &mut Vec<FrameRange>) {
        match ranges.last_mut() {
            Some(last) if last.end() == self.start => last.count += self.count,
            _ => ranges.push(self),
        }
    }

    /// Splits the range at huge-frame borders: each piece lies in one huge frame.
    pub fn by_huge(self) -> impl Iterator<Item = FrameRange> {
        let end = self.end().0;
        let mut at = self.start.0;
        core::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let stop = end.min((at / FRAMES_PER_HUGE + 1) * FRAMES_PER_HUGE);
            let piece = FrameRange::new(Gfn(at), stop - at);
            at = stop;
            Some(piece)
        })
    }
}

impl fmt::Debug for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpa {:#x}", self.0)
    }
}

impl fmt::Debug for Hva {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hva {:#x}", self.0)
    }
}

impl fmt::Debug for Gfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gfn {:#x}", self.0)
    }
}

impl fmt::Debug for HugeFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "huge {:#x}", self.0)
    }
}

impl fmt::Debug for FrameRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gfn {:#x}+{}", self.start.0, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one() {
        let mut ranges = Vec::new();
        for (start, count) in [(0, 2), (2, 3), (6, 1)] {
            FrameRange::new(Gfn(start), count).join(&mut ranges);
        }
        assert_eq!(ranges, [FrameRange::new(Gfn(0), 5), FrameRange::new(Gfn(6), 1)]);
    }

    #[test]
    fn a_wild_frame_number_does_not_wrap() {
        assert_eq!(Gfn(u64::MAX).gpa(), Gpa(u64::MAX));
        assert_eq!(FrameRange::new(Gfn(u64::MAX), 2).end(), Gfn(u64::MAX));
    }

    #[test]
    fn ranges_split_at_huge_borders() {
        let mut pieces = FrameRange::new(Gfn(500), 600).by_huge();
        assert_eq!(pieces.next(), Some(FrameRange::new(Gfn(500), 12)));
        assert_eq!(pieces.next(), Some(FrameRange::new(Gfn(512), 512)));
        assert_eq!(pieces.next(), Some(FrameRange::new(Gfn(1024), 76)));
        assert_eq!(pieces.next(), None);
    }
}
