//! x86-64 page tables: kernel virtual address to guest-physical address.

use ebb_units::{FRAME_BYTES, Gpa};

use crate::GuestMemory;

const PRESENT: u64 = 1;
/// In a PUD or PMD entry: a leaf of 1 GiB or 2 MiB.
const LEAF: u64 = 1 << 7;
/// Bits 12..52 of an entry hold the frame's address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Log2 of the bytes that one entry of the lowest level maps.
const FRAME_BITS: u32 = 12;

/// A tree of page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tables {
    /// The root table's address.
    pub root: Gpa,
    /// 4 or 5.
    pub levels: u32,
}

/// What the tables say of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Walk {
    /// Mapped to `gpa`, and so on for `bytes` (at least 1) in a row: the rest of the leaf.
    Mapped {
        /// Where the address leads.
        gpa: Gpa,
        /// Bytes up to the leaf's end.
        bytes: u64,
    },
    /// Not mapped, nor are the next `bytes` (at least 1).
    Absent {
        /// Bytes up to the absent entry's end.
        bytes: u64,
    },
}

impl Tables {
    /// Follows the tables for `va`. Reads one word a level, so tables that lead in
    /// circles cost no more than others.
    pub fn walk(&self, mem: &dyn GuestMemory, va: u64) -> Walk {
        if !self.canonical(va) {
            return Walk::Absent { bytes: FRAME_BYTES - va % FRAME_BYTES };
        }
        let mut table = self.root.0;
        for level in (0..self.levels).rev() {
            let bits = FRAME_BITS + 9 * level;
            let bytes = (1 << bits) - va % (1 << bits);
            let index = (va >> bits) % 512;
            let entry = mem.word(Gpa(table + 8 * index)).unwrap_or(0);
            if entry & PRESENT == 0 {
                return Walk::Absent { bytes };
            }
            let huge = (level == 1 || level == 2) && entry & LEAF != 0;
            if level == 0 || huge {
                // A leaf of 2 MiB or 1 GiB has a flag (PAT) where its address is
                // below its own size; the mask takes it off.
                let base = entry & ADDRESS & !((1 << bits) - 1);
                return Walk::Mapped { gpa: Gpa(base + va % (1 << bits)), bytes };
            }
            table = entry & ADDRESS;
        }
        Walk::Absent { bytes: 1 }
    }

    /// Where `va` leads, `None` where it is not mapped.
    pub fn translate(&self, mem: &dyn GuestMemory, va: u64) -> Option<Gpa> {
        match self.walk(mem, va) {
            Walk::Mapped { gpa, .. } => Some(gpa),
            Walk::Absent { .. } => None,
        }
    }

    /// The word at `va`.
    pub(crate) fn word(&self, mem: &dyn GuestMemory, va: u64) -> Option<u64> {
        mem.word(self.translate(mem, va)?)
    }

    /// Whether the bits above those that the tables look at repeat the highest of them.
    fn canonical(&self, va: u64) -> bool {
        let spare = 64 - (FRAME_BITS + 9 * self.levels.min(5));
        (((va << spare) as i64) >> spare) as u64 == va
    }
}
