//! The used rings' indices, pinned from one SET_VRING_ADDR to the next (vhost-user protocol).
//!
//! At SET_VRING_ADDR the library reads the used ring's index in its own thread. A queue's thread
//! pins the rings only later, and unpins them when the queue stops. While the VM is paused their
//! frame may be evicted, and a read of the hole would put zeros in place of its content.
//!
//! Nobody tells when the library has read the index, so the pin outlives the queue's stop.

use std::collections::BTreeMap;
use std::sync::Arc;

use ebb_units::Gpa;
use ebb_vhost::{Access, Dma, Message, Parted, Pinned, Segment};
use vhost::vhost_user::message::FrontendReq as Request;
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

/// Flags and index: virtio 1.2, section 2.7.8.
const INDEX_BYTES: u32 = 4;

/// A part of the memory table.
struct Region {
    gpa: u64,
    bytes: u64,
    /// Its address in the front end.
    hva: u64,
}

/// The used rings of one front end's queues.
pub(crate) struct UsedRings {
    dma: Arc<dyn Dma>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    queues: u16,
    regions: Vec<Region>,
    pins: BTreeMap<u32, Pinned>,
}

impl UsedRings {
    pub(crate) fn new(
        dma: Arc<dyn Dma>,
        memory: GuestMemoryAtomic<GuestMemoryMmap>,
        queues: u16,
    ) -> UsedRings {
        UsedRings { dma, memory, queues, regions: Vec::new(), pins: BTreeMap::new() }
    }

    /// Whether the library may have this message now. If not, ask again soon. `has_memory`: the
    /// library has the memory of the last table that it got.
    ///
    /// # Errors
    /// A used ring is in memory that no device may use.
    pub(crate) fn admit(&mut self, message: &Message, has_memory: bool) -> Result<bool, Parted> {
        match Request::try_from(message.request) {
            Ok(Request::SET_MEM_TABLE) => self.regions = regions(message),
            Ok(Request::SET_VRING_ADDR) => return self.pin(message, has_memory),
            _ => {}
        }
        Ok(true)
    }

    fn pin(&mut self, message: &Message, has_memory: bool) -> Result<bool, Parted> {
        let (Some(queue), Some(hva)) = (message.u32(0), message.u64(2)) else { return Ok(true) };
        // The library refuses what has no queue or no memory, and reads nothing.
        let Some(gpa) = self.gpa(hva).filter(|_| queue < u32::from(self.queues)) else {
            return Ok(true);
        };
        if !has_memory {
            return Ok(false);
        }
        let index = vec![Segment { gpa, bytes: INDEX_BYTES }];
        let memory = self.memory.memory().into_inner();
        match Pinned::new(&self.dma, &memory, index, Access::Keep) {
            Ok(pinned) => {
                self.pins.insert(queue, pinned);
                Ok(true)
            }
            Err(fault) if fault.passes() => Ok(false),
            Err(_) => Err(Parted::Request(message.request)),
        }
    }

    fn gpa(&self, hva: u64) -> Option<Gpa> {
        self.regions.iter().find_map(|region| {
            let offset = hva.checked_sub(region.hva).filter(|offset| *offset < region.bytes)?;
            region.gpa.checked_add(offset).map(Gpa)
        })
    }
}

/// Returns the regions of a memory table: a count and padding, then four words for each region.
fn regions(message: &Message) -> Vec<Region> {
    let count = message.u32(0).unwrap_or(0) as usize;
    let region = |index: usize| {
        let word = |word| message.u64(1 + 4 * index + word);
        Some(Region { gpa: word(0)?, bytes: word(1)?, hva: word(2)? })
    };
    (0..count).map_while(region).collect()
}
