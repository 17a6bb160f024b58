//! Refuses devices the use of unplugged memory, even for this device's own queue (virtio 1.2,
//! section 5.15.6.1).

use std::sync::Arc;

use ebb_units::{FRAME_BYTES, Gpa};
use ebb_vhost::{Access, Dma, DmaFault, Segment};
use ebb_virtio_mem::{Guard, Touch};
use vm_memory::GuestMemoryMmap;

/// A [`Dma`] that pins no unplugged memory.
pub(crate) struct Gate {
    dma: Arc<dyn Dma>,
    guard: Arc<Guard>,
}

impl Gate {
    pub(crate) fn new(dma: Arc<dyn Dma>, guard: Arc<Guard>) -> Gate {
        Gate { dma, guard }
    }
}

impl Dma for Gate {
    fn pin(&self, segments: &[Segment], access: Access) -> Result<(), DmaFault> {
        for segment in segments {
            let first = segment.gpa.0 / FRAME_BYTES;
            let end = segment.gpa.0.saturating_add(u64::from(segment.bytes)).div_ceil(FRAME_BYTES);
            for gfn in first..end {
                let gpa = Gpa(gfn * FRAME_BYTES);
                if self.guard.judge(gpa, true) == Touch::Forbidden {
                    return Err(DmaFault::Forbidden(gpa));
                }
            }
        }
        self.dma.pin(segments, access)
    }

    fn unpin(&self, segments: &[Segment]) {
        self.dma.unpin(segments);
    }

    fn place(
        &self,
        memory: &Arc<GuestMemoryMmap>,
        segments: &[Segment],
    ) -> Result<Option<Vec<Segment>>, DmaFault> {
        self.dma.place(memory, segments)
    }
}
