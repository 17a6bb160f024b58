//! One disk, as its device sees the VM's memory.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use ebb_block::{Block, Direction, Observer};
use ebb_units::Gfn;
use ebb_vhost::{Access, Dma, DmaFault, Segment};
use vm_memory::GuestMemoryMmap;

use crate::disks::{Disk, SharedDisks, block_of};
use crate::pins::{frames_of, nobody_there};

/// Connects one disk with guest memory: pins for it, and observes the blocks that move.
pub struct Port {
    shared: Arc<SharedDisks>,
    index: usize,
}

impl Port {
    /// Returns a port for each of the disks, in order.
    pub fn each(shared: &Arc<SharedDisks>) -> impl Iterator<Item = Arc<Port>> {
        let port = move |index| Arc::new(Port { shared: Arc::clone(shared), index });
        (0..shared.disks.len()).map(port)
    }

    fn disk(&self) -> &Disk {
        &self.shared.disks[self.index]
    }

    fn global(&self, block: u64) -> u64 {
        block_of(self.index, block)
    }

    /// Pins like a passed-through device: waits for nobody, and fails for what is not mapped.
    fn pin_mapped(&self, segments: &[Segment]) -> Result<(), DmaFault> {
        let iommu = self.shared.iommu().ok_or_else(|| nobody_there(segments))?;
        for (index, segment) in segments.iter().enumerate() {
            if let Err(gfn) = iommu.pin(frames_of(*segment)) {
                segments[..index].iter().for_each(|segment| iommu.unpin(frames_of(*segment)));
                return Err(DmaFault::Forbidden(gfn.gpa()));
            }
        }
        Ok(())
    }
}

impl Dma for Port {
    fn pin(&self, segments: &[Segment], access: Access) -> Result<(), DmaFault> {
        let disk = self.disk();
        match disk.is_strict {
            true => self.pin_mapped(segments),
            false => disk.dma.pin(segments, access),
        }
    }

    fn unpin(&self, segments: &[Segment]) {
        match (self.disk().is_strict, self.shared.iommu()) {
            (true, Some(iommu)) => {
                segments.iter().for_each(|segment| iommu.unpin(frames_of(*segment)));
            }
            (true, None) => {}
            (false, _) => self.disk().dma.unpin(segments),
        }
    }

    fn place(
        &self,
        memory: &Arc<GuestMemoryMmap>,
        segments: &[Segment],
    ) -> Result<Option<Vec<Segment>>, DmaFault> {
        self.disk().dma.place(memory, segments)
    }
}

impl Observer for Port {
    fn wants_content(&self) -> bool {
        true
    }

    fn before_overwrite(&self, blocks: Range<u64>) -> io::Result<()> {
        let blocks = self.global(blocks.start)..self.global(blocks.end);
        // First the blocks are no longer found, then the frames that they back are refilled.
        self.shared.hashes.forget(blocks.clone());
        match self.disk().dma.pager() {
            // Whoever has such a frame locked unlocks it some time.
            Some(pager) => {
                pager.devices().vacate_soon(blocks).map_err(|error| match error.kind() {
                    // The host may have memory again later: the guest's write must not fail.
                    io::ErrorKind::TimedOut | io::ErrorKind::OutOfMemory => {
                        io::ErrorKind::WouldBlock.into()
                    }
                    _ => error,
                })
            }
            // No pager can refill these frames now.
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn moved(&self, block: u64, _: Gfn, content: &Block, _: Direction) {
        self.shared.hashes.insert(self.global(block), content);
    }
}
