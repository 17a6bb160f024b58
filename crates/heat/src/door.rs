//! The one way by which a guest's page tables are written.

use std::io;
use std::sync::atomic::AtomicU64;

use ebb_inspect::GuestMemory;
use ebb_pager::{Pager, View};
use ebb_units::Gfn;

/// Entries of a page table.
pub const ENTRIES: usize = 512;

/// A page table's entries, read once each.
pub type Entries = [u64; ENTRIES];

/// A guest's RAM with its page tables, whose entries may be changed.
pub trait TableMemory {
    /// The RAM, to be read.
    fn memory(&self) -> &dyn GuestMemory;

    /// Reads a frame, word by word. `false`: it is not in memory, or no RAM. Never gives a
    /// hole memory.
    fn read(&self, table: Gfn, entries: &mut Entries) -> bool;

    /// Runs `work` while nobody in the guest can write to the frame `metadata`. `false`: that
    /// cannot be had now.
    ///
    /// # Errors
    /// From the host.
    fn while_held(&self, metadata: Gfn, work: &mut dyn FnMut(&dyn HeldTables)) -> io::Result<bool>;
}

/// What may be done while page metadata is held.
pub trait HeldTables {
    /// Runs `work` with a frame's words as they are read now, and in place, to be compared
    /// and swapped, while the frame stays where it is. `false`: it is not plain memory now.
    ///
    /// The caller has made sure, since the metadata is held, that the frame is a page table.
    fn table(&self, table: Gfn, work: &mut dyn FnMut(&Entries, &[AtomicU64])) -> bool;
}

/// A held VM's.
pub struct PagerTables<'p> {
    pager: &'p Pager,
    view: View<'p>,
}

impl<'p> PagerTables<'p> {
    /// The pager must be told of writes to page metadata: `ebb_pager::Frames::watch_writes`.
    pub fn new(pager: &'p Pager) -> PagerTables<'p> {
        PagerTables { pager, view: pager.view() }
    }
}

impl TableMemory for PagerTables<'_> {
    fn memory(&self) -> &dyn GuestMemory {
        &self.view
    }

    fn read(&self, table: Gfn, entries: &mut Entries) -> bool {
        self.pager.tables().read_table(table, entries)
    }

    fn while_held(&self, metadata: Gfn, work: &mut dyn FnMut(&dyn HeldTables)) -> io::Result<bool> {
        let Some(held) = self.pager.tables().hold_metadata(metadata)? else { return Ok(false) };
        work(&held);
        Ok(true)
    }
}

impl HeldTables for ebb_pager::HeldMetadata<'_> {
    fn table(&self, table: Gfn, work: &mut dyn FnMut(&Entries, &[AtomicU64])) -> bool {
        self.with_table(table, work)
    }
}
