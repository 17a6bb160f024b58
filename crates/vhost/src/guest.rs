//! A guest's memory as the device sees it. Every access is checked and pinned.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_units::Gpa;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::dma::{Access, Dma, DmaFault, Pinned, Segment};

/// The memory of a guest, for the accesses of one request.
#[derive(Clone)]
pub struct Guest {
    memory: Arc<GuestMemoryMmap>,
    dma: Arc<dyn Dma>,
    faults: Arc<AtomicU64>,
}

impl Guest {
    /// Makes a view of all of `memory`. `dma` says what devices may use, and `faults` counts the
    /// accesses that it refuses for good.
    pub fn new(memory: Arc<GuestMemoryMmap>, dma: Arc<dyn Dma>, faults: Arc<AtomicU64>) -> Guest {
        Guest { memory, dma, faults }
    }

    /// Returns the mapping. Only a caller that has pinned memory may use it, and only that memory.
    pub fn memory(&self) -> Arc<GuestMemoryMmap> {
        self.memory.clone()
    }

    /// Pins segments. It counts the refusals that are final.
    ///
    /// # Errors
    /// A segment is not RAM, the device may not use it, or it cannot be made resident now.
    pub fn pin(&self, segments: Vec<Segment>, access: Access) -> Result<Pinned, DmaFault> {
        self.try_pin(segments, access).inspect_err(|fault| {
            tracing::debug!("{fault}");
            self.faults.fetch_add(u64::from(!fault.passes()), Relaxed);
        })
    }

    fn try_pin(&self, segments: Vec<Segment>, access: Access) -> Result<Pinned, DmaFault> {
        for segment in &segments {
            let address = GuestAddress(segment.gpa.0);
            if !GuestMemoryBackend::check_range(&*self.memory, address, segment.bytes as usize) {
                return Err(DmaFault::Forbidden(segment.gpa));
            }
        }
        Pinned::new(&self.dma, &self.memory, segments, access)
    }

    /// Copies `segments` to the beginning of `into`.
    ///
    /// # Errors
    /// As [`Guest::pin`].
    pub fn read(&self, segments: Vec<Segment>, into: &mut [u8]) -> Result<(), DmaFault> {
        let pinned = self.pin(segments, Access::Keep)?;
        let mut rest = into;
        for segment in pinned.segments() {
            let fault = DmaFault::Forbidden(segment.gpa);
            let (part, tail) = rest.split_at_mut_checked(segment.bytes as usize).ok_or(fault)?;
            let address = GuestAddress(segment.gpa.0);
            self.memory.read_slice(part, address).map_err(|_| fault)?;
            rest = tail;
        }
        Ok(())
    }

    /// Copies the beginning of `from` to `segments`.
    ///
    /// # Errors
    /// As [`Guest::pin`].
    pub fn write(&self, segments: Vec<Segment>, from: &[u8]) -> Result<(), DmaFault> {
        let pinned = self.pin(segments, Access::Replace)?;
        let mut rest = from;
        for segment in pinned.segments() {
            let fault = DmaFault::Forbidden(segment.gpa);
            let (part, tail) = rest.split_at_checked(segment.bytes as usize).ok_or(fault)?;
            let address = GuestAddress(segment.gpa.0);
            self.memory.write_slice(part, address).map_err(|_| fault)?;
            rest = tail;
        }
        Ok(())
    }

    /// Reads `N` bytes at `gpa`.
    ///
    /// # Errors
    /// As [`Guest::pin`].
    pub fn read_array<const N: usize>(&self, gpa: Gpa) -> Result<[u8; N], DmaFault> {
        let mut bytes = [0; N];
        self.read(vec![Segment { gpa, bytes: N as u32 }], &mut bytes)?;
        Ok(bytes)
    }
}
