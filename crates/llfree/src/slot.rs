//! The word of a reservation slot: where one core, or all of them, takes frames of one kind.

use crate::area::Area;
use crate::layout::{
    AREA_INVERTED, AREA_ROWS, SLOT_CLAIMS_MASK, SLOT_INVERTED, SLOT_PRESENT, SLOT_ROW_SHIFT,
    TREE_AREAS,
};

// The flag of an area is copied as it is.
const _: () = assert!(SLOT_INVERTED == AREA_INVERTED as u64);

/// A copy of a slot's word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slot(pub u64);

impl Slot {
    pub const NONE: Slot = Slot(0);

    /// Makes a reservation at `row`, with `claims` frames of its area, whose word was `area`.
    pub fn new(row: usize, claims: u16, area: Area) -> Slot {
        let inverted = u64::from(area.0) & SLOT_INVERTED;
        Slot((row as u64) << SLOT_ROW_SHIFT | SLOT_PRESENT | inverted | u64::from(claims))
    }

    #[inline(always)]
    pub fn claims(self) -> u16 {
        (self.0 & SLOT_CLAIMS_MASK) as u16
    }

    #[inline(always)]
    pub fn row(self) -> usize {
        (self.0 >> SLOT_ROW_SHIFT) as usize
    }

    #[inline(always)]
    pub fn area(self) -> usize {
        self.row() / AREA_ROWS
    }

    /// Returns the tree of the reserved area, if there is a reservation.
    pub fn tree(self) -> Option<usize> {
        (self.0 & SLOT_PRESENT != 0).then_some(self.area() / TREE_AREAS)
    }

    #[inline(always)]
    pub fn flip(self) -> u64 {
        if self.0 & SLOT_INVERTED != 0 { u64::MAX } else { 0 }
    }

    /// Uses up one claim. The slot must have one.
    #[inline(always)]
    pub fn take(self) -> Slot {
        Slot(self.0 - 1)
    }

    #[inline(always)]
    pub fn at_row(self, row: usize) -> Slot {
        Slot(self.0 & ((1 << SLOT_ROW_SHIFT) - 1) | (row as u64) << SLOT_ROW_SHIFT)
    }

    pub fn without_claims(self) -> Slot {
        Slot(self.0 & !SLOT_CLAIMS_MASK)
    }
}
