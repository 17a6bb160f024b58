//! A guest's memory as the device sees it: every access is checked and pinned.

use std::sync::Arc;

use ebb_units::Gpa;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::counters::{Counters, add};
use crate::dma::{Access, Dma, DmaFault, Pinned, Segment};

/// The memory that one request is about.
#[derive(Clone)]
pub(crate) struct Guest {
    memory: Arc<GuestMemoryMmap>,
    dma: Arc<dyn Dma>,
    counters: Arc<Counters>,
}

impl Guest {
    pub(crate) fn new(
        memory: Arc<GuestMemoryMmap>,
        dma: Arc<dyn Dma>,
        counters: Arc<Counters>,
    ) -> Guest {
        Guest { memory, dma, counters }
    }

    pub(crate) fn memory(&self) -> Arc<GuestMemoryMmap> {
        self.memory.clone()
    }

    /// Pins what lies in RAM; what is refused is counted.
    pub(crate) fn pin(&self, segments: Vec<Segment>, access: Access) -> Result<Pinned, DmaFault> {
        self.try_pin(segments, access).inspect_err(|fault| {
            add(&self.counters.dma_faults, 1);
            tracing::debug!("{fault}");
        })
    }

    fn try_pin(&self, segments: Vec<Segment>, access: Access) -> Result<Pinned, DmaFault> {
        for segment in &segments {
            let address = GuestAddress(segment.gpa.0);
            if !GuestMemoryBackend::check_range(&*self.memory, address, segment.bytes as usize) {
                return Err(DmaFault { gpa: segment.gpa });
            }
        }
        Pinned::new(&self.dma, segments, access)
    }

    /// Copies `segments` to the beginning of `into`.
    pub(crate) fn read(&self, segments: Vec<Segment>, into: &mut [u8]) -> Result<(), DmaFault> {
        let pinned = self.pin(segments, Access::Keep)?;
        let mut rest = into;
        for segment in pinned.segments() {
            let fault = DmaFault { gpa: segment.gpa };
            let (part, tail) = rest.split_at_mut_checked(segment.bytes as usize).ok_or(fault)?;
            let address = GuestAddress(segment.gpa.0);
            self.memory.read_slice(part, address).map_err(|_| fault)?;
            rest = tail;
        }
        Ok(())
    }

    /// Copies the beginning of `from` to `segments`.
    pub(crate) fn write(&self, segments: Vec<Segment>, from: &[u8]) -> Result<(), DmaFault> {
        let pinned = self.pin(segments, Access::Replace)?;
        let mut rest = from;
        for segment in pinned.segments() {
            let fault = DmaFault { gpa: segment.gpa };
            let (part, tail) = rest.split_at_checked(segment.bytes as usize).ok_or(fault)?;
            let address = GuestAddress(segment.gpa.0);
            self.memory.write_slice(part, address).map_err(|_| fault)?;
            rest = tail;
        }
        Ok(())
    }

    /// A few bytes.
    pub(crate) fn read_array<const N: usize>(&self, gpa: Gpa) -> Result<[u8; N], DmaFault> {
        let mut bytes = [0; N];
        self.read(vec![Segment { gpa, bytes: N as u32 }], &mut bytes)?;
        Ok(bytes)
    }
}
