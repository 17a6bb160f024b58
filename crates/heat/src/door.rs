//! The only way by which a guest's page tables are written.

use std::io;
use std::sync::atomic::AtomicU64;

use ebb_inspect::GuestMemory;
use ebb_pager::{Pager, View};
use ebb_units::Gfn;

/// Number of entries in a page table.
pub const ENTRIES: usize = 512;

/// The entries of a page table, each read once.
pub type Entries = [u64; ENTRIES];

/// A guest's RAM and its page tables, whose entries can be changed.
pub trait TableMemory {
    /// The RAM, for reading.
    fn memory(&self) -> &dyn GuestMemory;

    /// Reads a frame, word by word. `false`: it is non-resident, or no RAM. Never gives memory to a
    /// hole.
    fn read(&self, table: Gfn, entries: &mut Entries) -> bool;

    /// Runs `work` while nobody in the guest can write to the frame `metadata`. `false`: that is
    /// not possible now.
    ///
    /// # Errors
    /// From the host.
    fn while_locked(
        &self,
        metadata: Gfn,
        work: &mut dyn FnMut(&dyn LockedTables),
    ) -> io::Result<bool>;
}

/// What is possible while page metadata is locked and protected.
pub trait LockedTables {
    /// Runs `work` with a frame's words, both as read now and in place for compare-and-swap, while
    /// the frame stays where it is. `false`: it is not plain memory now.
    ///
    /// The caller must have checked, since the metadata was locked, that the frame is a page table.
    fn table(&self, table: Gfn, work: &mut dyn FnMut(&Entries, &[AtomicU64])) -> bool;
}

/// The page tables of a managed VM.
pub struct PagerTables<'p> {
    pager: &'p Pager,
    view: View<'p>,
}

impl<'p> PagerTables<'p> {
    /// Requires that the pager is told of writes to page metadata:
    /// `ebb_pager::Frames::watch_writes`.
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

    fn while_locked(
        &self,
        metadata: Gfn,
        work: &mut dyn FnMut(&dyn LockedTables),
    ) -> io::Result<bool> {
        let Some(held) = self.pager.tables().lock_metadata(metadata)? else { return Ok(false) };
        work(&held);
        Ok(true)
    }
}

impl LockedTables for ebb_pager::LockedMetadata<'_> {
    fn table(&self, table: Gfn, work: &mut dyn FnMut(&Entries, &[AtomicU64])) -> bool {
        self.with_table(table, work)
    }
}
