//! A guest's memory as the device sees it: every access is checked and pinned.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_units::Gpa;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::dma::{Access, Dma, DmaFault, Pinned, Segment};

/// The memory that one request is about.
#[derive(Clone)]
pub struct Guest {
    memory: Arc<GuestMemoryMmap>,
    dma: Arc<dyn Dma>,
    faults: Arc<AtomicU64>,
}

impl Guest {
    /// All of `memory`, as far as `dma` lets devices use it; what it does not is counted in
    /// `faults`.
    pub fn new(memory: Arc<GuestMemoryMmap>, dma: Arc<dyn Dma>, faults: Arc<AtomicU64>) -> Guest {
        Guest { memory, dma, faults }
    }

    /// The mapping, which only who has pinned something there may use.
    pub fn memory(&self) -> Arc<GuestMemoryMmap> {
        self.memory.clone()
    }

    /// Pins what lies in RAM; what is forbidden is counted.
    ///
    /// # Errors
    /// Some of it is no RAM, the device may not use it, or it cannot be had now.
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

    /// A few bytes.
    ///
    /// # Errors
    /// As [`Guest::pin`].
    pub fn read_array<const N: usize>(&self, gpa: Gpa) -> Result<[u8; N], DmaFault> {
        let mut bytes = [0; N];
        self.read(vec![Segment { gpa, bytes: N as u32 }], &mut bytes)?;
        Ok(bytes)
    }
}
