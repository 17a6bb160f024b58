//! The word of one area: 512 frames, one huge frame.

use crate::layout::{
    AREA_ALLOCATED, AREA_EVICTED, AREA_FRAMES, AREA_FREE_MASK, AREA_INVERTED, TREE_STEP,
};

/// A copy of an area's word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Area(pub u16);

const ALL: u16 = AREA_FRAMES as u16;

impl Area {
    /// Word of an area that is free as a whole, with all its bits zero.
    pub const FREE: Area = Area(ALL);

    /// Returns the number of frames that are free and not claimed. It exceeds 512 only if somebody
    /// broke the rules.
    #[inline(always)]
    pub fn free(self) -> u16 {
        self.0 & AREA_FREE_MASK
    }

    #[inline(always)]
    pub fn is_allocated(self) -> bool {
        self.0 & AREA_ALLOCATED != 0
    }

    #[inline(always)]
    pub fn is_evicted(self) -> bool {
        self.0 & AREA_EVICTED != 0
    }

    /// Returns the mask to XOR a row with, so that a set bit means "allocated".
    #[inline(always)]
    pub fn flip(self) -> u64 {
        if self.0 & AREA_INVERTED != 0 { u64::MAX } else { 0 }
    }

    /// Whether all frames are free and none is claimed.
    #[inline(always)]
    pub fn is_free(self) -> bool {
        self.free() == ALL && !self.is_allocated()
    }

    /// Whether `frames` frames can be claimed.
    #[inline(always)]
    pub fn has(self, frames: u16) -> bool {
        self.free() >= frames && !self.is_allocated()
    }

    /// Claims `frames` frames, which the area must have.
    #[inline(always)]
    pub fn minus(self, frames: u16) -> Area {
        Area(self.0 - frames)
    }

    /// Gives `frames` frames back. Returns `None` if the area would then have too many.
    #[inline(always)]
    pub fn plus(self, frames: u16) -> Option<Area> {
        let fits = self.free() + frames <= ALL && !self.is_allocated();
        fits.then_some(Area(self.0 + frames))
    }

    /// Allocates the area as a whole to the guest. The bits stay as they are, and now mean
    /// "allocated".
    #[inline(always)]
    pub fn taken(self) -> Area {
        Area((self.0 & !AREA_FREE_MASK | AREA_ALLOCATED) ^ AREA_INVERTED)
    }

    /// Reverses [`Area::taken`].
    #[inline(always)]
    pub fn given_back(self) -> Area {
        Area((self.0 & !(AREA_FREE_MASK | AREA_ALLOCATED) | ALL) ^ AREA_INVERTED)
    }

    /// Replaces the allocation as a whole by an allocation of each frame. The bits already say so.
    pub fn split(self) -> Area {
        Area(self.0 & !AREA_ALLOCATED)
    }

    /// Hard-reclaims the area. The bits stay, and still mean "free".
    pub fn hard_reclaimed(self) -> Area {
        Area(self.0 & !AREA_FREE_MASK | AREA_ALLOCATED | AREA_EVICTED)
    }

    /// Reverses [`Area::hard_reclaimed`], but the area still has no memory.
    pub fn returned(self) -> Area {
        Area(self.0 & !(AREA_FREE_MASK | AREA_ALLOCATED) | ALL | AREA_EVICTED)
    }

    pub fn evicted(self) -> Area {
        Area(self.0 | AREA_EVICTED)
    }

    /// Returns what the free frames count for in the tree. 0 and 512 are exact; all counts between
    /// become a multiple of [`TREE_STEP`] from 16 to 496. So a tree's word is written once in
    /// sixteen times, and still tells empty and full.
    #[inline(always)]
    pub fn steps(self) -> u32 {
        let free = u32::from(self.free().min(ALL));
        let up = free.div_ceil(TREE_STEP);
        up.min(31 + free / 512) * TREE_STEP
    }
}

const _: () = assert!(AREA_FRAMES == 512 && TREE_STEP == 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_and_full_are_exact_and_nothing_between_is() {
        assert_eq!(Area(0).steps(), 0);
        assert_eq!(Area(512).steps(), 512);
        for free in 1..512 {
            let steps = Area(free).steps();
            assert!((16..=496).contains(&steps) && steps.is_multiple_of(16));
            assert!(steps.abs_diff(free.into()) < 16);
            assert!(steps >= Area(free - 1).steps());
        }
    }

    #[test]
    fn taking_turns_the_bits_and_giving_back_turns_them_again() {
        let evicted = Area::FREE.evicted();
        assert_eq!(evicted.taken().given_back(), evicted);
        assert_ne!(evicted.taken().flip(), evicted.flip());
        assert_eq!(Area::FREE.hard_reclaimed().returned(), evicted);
        assert_eq!(Area::FREE.hard_reclaimed().flip(), Area::FREE.flip());
    }
}
