//! x86-64 page tables: kernel virtual address to guest-physical address.

use ebb_units::{FRAME_BYTES, Gpa};

use crate::GuestMemory;

const PRESENT: u64 = 1;
/// Leaf flag of a PUD or PMD entry: a leaf of 1 GiB or 2 MiB.
const LEAF: u64 = 1 << 7;
/// Bits 12..52 of an entry: the address that it leads to.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Log2 of the bytes that one entry of the lowest level maps.
const FRAME_BITS: u32 = 12;

/// A tree of page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageTables {
    /// The root table's address.
    pub root: Gpa,
    /// Levels of the tree: 4 or 5.
    pub levels: u32,
}

/// What the tables tell about an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Walk {
    /// The address is mapped to `gpa`, and so on for `bytes` (at least 1): the rest of the leaf.
    Mapped {
        /// Where the address leads.
        gpa: Gpa,
        /// Bytes up to the leaf's end.
        bytes: u64,
    },
    /// The address is not mapped, and neither are the next `bytes` (at least 1).
    Absent {
        /// Bytes up to the absent entry's end.
        bytes: u64,
    },
}

/// End of guest-physical addresses: they have 52 bits at most.
pub(crate) const GPA_END: u64 = 1 << 52;

impl PageTables {
    /// The tables that a vCPU uses by its CR3.
    pub fn of_cr3(cr3: u64, levels: u32) -> PageTables {
        PageTables { root: Gpa(cr3 & (GPA_END - 1) & !(FRAME_BYTES - 1)), levels }
    }

    /// The tables that a process may use by its CR3, and its kernel with them. With page-table
    /// isolation Linux gives a process a pair of roots: its own has bit 12 set and maps little of
    /// the kernel, and the other is the kernel's. Without isolation the other frame of the pair is
    /// anybody's.
    pub fn pair_of_cr3(cr3: u64, levels: u32) -> [PageTables; 2] {
        [cr3, cr3 & !FRAME_BYTES].map(|cr3| PageTables::of_cr3(cr3, levels))
    }

    /// Whether `va` is mapped to `gpa`.
    pub fn maps(&self, mem: &dyn GuestMemory, va: u64, gpa: Gpa) -> bool {
        self.translate(mem, va) == Some(gpa)
    }

    /// Walks the tables for `va`. Reads one word a level, so tables that form a cycle cost no more
    /// than others.
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
                // A leaf of 2 MiB or 1 GiB has a flag (PAT) among the address bits below its own
                // size. The mask clears it.
                let base = entry & ADDRESS & !((1 << bits) - 1);
                return Walk::Mapped { gpa: Gpa(base + va % (1 << bits)), bytes };
            }
            table = entry & ADDRESS;
        }
        Walk::Absent { bytes: 1 }
    }

    /// The address that `va` is mapped to. `None` if it is not mapped.
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

    /// Whether the bits above those that the tables translate repeat the highest of them.
    fn canonical(&self, va: u64) -> bool {
        let spare = 64 - (FRAME_BITS + 9 * self.levels.min(5));
        (((va << spare) as i64) >> spare) as u64 == va
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Snapshot;

    const TABLES: PageTables = PageTables { root: Gpa(0), levels: 4 };
    const WHOLE_GIB: u64 = 1 << 30;

    /// Four tables in a row, where entry 1 of each leads to the next.
    fn chain() -> Snapshot {
        let mut mem = Snapshot::new();
        mem.add(Gpa(0), vec![0; 4 * 512]);
        for level in 0..3 {
            mem.set(Gpa(level * 0x1000 + 8), ((level + 1) * 0x1000) | PRESENT);
        }
        mem.set(Gpa(0x3000 + 8), 0x7000 | PRESENT);
        mem
    }

    /// The address whose index is 1 at every level.
    const ONES: u64 = 1 << 39 | 1 << 30 | 1 << 21 | 1 << 12;

    #[test]
    fn follows_four_levels_to_a_frame() {
        let walk = TABLES.walk(&chain(), ONES + 0x123);
        assert_eq!(walk, Walk::Mapped { gpa: Gpa(0x7123), bytes: 0x1000 - 0x123 });
    }

    #[test]
    fn follows_five_levels() {
        let mem = chain();
        let tables = PageTables { root: Gpa(0), levels: 5 };
        mem.set(Gpa(0x3000 + 8), PRESENT);
        // The lowest table is the root again, so its entry 1 is a frame's entry here.
        assert_eq!(tables.translate(&mem, ONES | 1 << 48), Some(Gpa(0x1000)));
    }

    #[test]
    fn ends_at_large_leaves() {
        let mem = chain();
        mem.set(Gpa(0x2008), 0xc000_0000 | 1 << 12 | LEAF | PRESENT);
        let bytes = (2 << 20) - 0x1000;
        assert_eq!(TABLES.walk(&mem, ONES), Walk::Mapped { gpa: Gpa(0xc000_1000), bytes });
        mem.set(Gpa(0x1008), WHOLE_GIB | LEAF | PRESENT);
        let bytes = WHOLE_GIB - 0x20_1000;
        assert_eq!(TABLES.walk(&mem, ONES), Walk::Mapped { gpa: Gpa(0x4020_1000), bytes });
    }

    #[test]
    fn tells_how_far_nothing_is_mapped() {
        let mem = chain();
        assert_eq!(TABLES.walk(&mem, ONES + 0x1000), Walk::Absent { bytes: 0x1000 });
        assert_eq!(TABLES.walk(&mem, ONES + (2 << 20)), Walk::Absent { bytes: (2 << 20) - 0x1000 });
        assert_eq!(TABLES.walk(&mem, 0), Walk::Absent { bytes: 1 << 39 });
    }

    #[test]
    fn an_address_that_is_not_canonical_is_not_mapped() {
        assert_eq!(TABLES.translate(&chain(), ONES | 1 << 48), None);
        assert_eq!(TABLES.translate(&chain(), ONES | 1 << 63), None);
    }

    #[test]
    fn tables_outside_ram_map_nothing() {
        let mem = chain();
        mem.set(Gpa(0x1008), ADDRESS | PRESENT);
        assert_eq!(TABLES.translate(&mem, ONES), None);
    }

    #[test]
    fn a_table_that_leads_to_itself_ends() {
        let mem = chain();
        mem.set(Gpa(8), PRESENT);
        assert_eq!(TABLES.translate(&mem, ONES), Some(Gpa(0)));
    }
}
