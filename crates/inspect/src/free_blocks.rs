//! What V-Probe asks of a guest, however its page metadata is known.

use ebb_units::{Gfn, Gpa};

use crate::{BuddyBlock, ChosenBlocks, Guest, GuestMemory, Head, Request};

/// A guest whose page metadata tells which blocks are free.
pub trait FreeBlocks {
    /// Appends to `out` the free blocks to reclaim. They are a hint: the guest may use them at any
    /// time.
    fn victims(
        &self,
        mem: &dyn GuestMemory,
        request: Request,
        out: &mut Vec<BuddyBlock>,
    ) -> ChosenBlocks;

    /// The frame whose protection keeps the guest from taking a block unnoticed: it holds the
    /// metadata of the block's first frame. `None`: no such frame is known.
    fn metadata_frame(&self, head: Gfn) -> Option<Gfn>;

    /// Returns a look at the metadata as it is from now on: which free block begins at a frame.
    fn heads<'a>(&'a self, mem: &'a dyn GuestMemory) -> Box<dyn FnMut(Gfn) -> Option<Head> + 'a>;
}

impl FreeBlocks for Guest {
    fn victims(
        &self,
        mem: &dyn GuestMemory,
        request: Request,
        out: &mut Vec<BuddyBlock>,
    ) -> ChosenBlocks {
        Guest::victims(self, mem, request, out)
    }

    /// By the page table of the inspection. A look walks it anew.
    fn metadata_frame(&self, head: Gfn) -> Option<Gfn> {
        self.memmap().metadata_gpa(head).map(Gpa::gfn)
    }

    fn heads<'a>(&'a self, mem: &'a dyn GuestMemory) -> Box<dyn FnMut(Gfn) -> Option<Head> + 'a> {
        let mut look = self.look(mem);
        Box::new(move |gfn| look.head(gfn))
    }
}
