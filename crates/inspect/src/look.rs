//! The second look of V-Probe's Algorithm 1, for many blocks.

use ebb_units::{Gfn, Gpa};

use crate::{GuestMemory, Memmap, PageLayout, PageTables, Walk};

/// Leaf size with which Linux maps its memory map where the CPU supports it: 2 MiB.
const LEAF_BYTES: u64 = 2 << 20;

/// The first frame of a free block, by its metadata as it is now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// The block has `1 << order` frames.
    pub order: u8,
    /// The frame that holds the head's `struct page`.
    pub metadata: Gfn,
}

/// A look at the metadata of blocks, by the guest's page tables as they are now.
///
/// It walks to each large leaf of the tables, which maps the metadata of 128 MiB, only once, so a
/// result may be as old as the look itself. To look again at metadata that was protected, make a
/// new `Look` after the last protection.
pub struct Look<'a> {
    pub(crate) mem: &'a dyn GuestMemory,
    pub(crate) tables: &'a PageTables,
    pub(crate) memmap: &'a Memmap,
    pub(crate) layout: &'a PageLayout,
    /// Virtual and guest-physical start of each leaf seen.
    pub(crate) leaves: Vec<(u64, Gpa)>,
}

impl Look<'_> {
    /// Returns the head of the free block that begins at `gfn`, if one does. Reads by
    /// [`GuestMemory::word`] and [`GuestMemory::page`] only.
    pub fn head(&mut self, gfn: Gfn) -> Option<Head> {
        let page = self.page(gfn)?;
        let order = self.layout.free_order(&self.mem.page(page)?)?;
        self.memmap.is_block(gfn, order).then_some(Head { order, metadata: page.gfn() })
    }

    fn page(&mut self, gfn: Gfn) -> Option<Gpa> {
        let va = self.memmap.page_va(gfn)?;
        let start = va - va % LEAF_BYTES;
        let known = self.leaves.iter().rev().find(|(leaf, _)| *leaf == start);
        if let Some((_, leaf)) = known {
            return Some(Gpa(leaf.0 + va % LEAF_BYTES));
        }
        match self.tables.walk(self.mem, start) {
            Walk::Mapped { gpa, bytes } if bytes >= LEAF_BYTES => {
                self.leaves.push((start, gpa));
                Some(Gpa(gpa.0 + va % LEAF_BYTES))
            }
            _ => self.tables.translate(self.mem, va),
        }
    }
}
