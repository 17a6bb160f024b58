//! The guest's memory as the front end shares it: vhost-user protocol, "Memory regions
//! description".

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ebb_sys::bus_guard::BusGuard;
use ebb_units::{Gpa, Hva};
use ebb_vhost::Message;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

/// Words of a region: address in the guest, bytes, address in the front end, offset in the file.
const REGION_WORDS: usize = 4;

/// A mapping of all the guest's memory.
#[derive(Default)]
pub(crate) struct Ram {
    /// Guards over mappings whose files the front end can shrink. They are dropped before the
    /// memory.
    guards: Vec<BusGuard>,
    memory: Arc<GuestMemoryMmap>,
    regions: Vec<Region>,
}

#[derive(Clone, Copy)]
struct Region {
    gpa: u64,
    bytes: u64,
    front_end: u64,
}

impl Ram {
    /// Maps what a SET_MEM_TABLE describes. Returns `None` if it cannot be mapped.
    pub(crate) fn new(message: &mut Message) -> Option<Ram> {
        let count = message.u32(0)? as usize;
        if message.files.len() != count || message.body.len() != (1 + REGION_WORDS * count) * 8 {
            return None;
        }
        let mut files: VecDeque<OwnedFd> = std::mem::take(&mut message.files);
        let (mut regions, mut mappings) = (Vec::new(), Vec::new());
        for index in 0..count {
            let word = |which| message.u64(1 + index * REGION_WORDS + which);
            let region = Region { gpa: word(0)?, bytes: word(1)?, front_end: word(2)? };
            region.front_end.checked_add(region.bytes)?;
            let file = FileOffset::new(File::from(files.pop_front()?), word(3)?);
            mappings.push(map(region, file)?);
            regions.push(region);
        }
        mappings.sort_by_key(|(gpa, _)| *gpa);
        let mappings = mappings.into_iter().map(|(_, mapping)| mapping).collect();
        let memory = GuestMemoryMmap::from_regions(mappings);
        let memory =
            memory.inspect_err(|error| tracing::warn!("a front end's memory: {error}")).ok()?;
        // Guard the mappings before any of the memory is touched.
        let guard =
            |region: &GuestRegionMmap| BusGuard::new(Hva(region.as_ptr() as u64), region.len());
        let guards = memory.iter().map(guard).collect::<Result<_, _>>().ok()?;
        memory.iter().for_each(ebb_vhost::use_small_pages);
        Some(Ram { guards, memory: Arc::new(memory), regions })
    }

    /// Whether memory was touched where its file had none.
    pub(crate) fn is_broken(&self) -> bool {
        self.guards.iter().any(BusGuard::is_broken)
    }

    pub(crate) fn memory(&self) -> Arc<GuestMemoryMmap> {
        self.memory.clone()
    }

    /// Returns the guest's address of what the front end has at `front_end`.
    pub(crate) fn gpa(&self, front_end: u64) -> Option<Gpa> {
        self.regions.iter().find_map(|region| {
            let offset = front_end.checked_sub(region.front_end)?;
            (offset < region.bytes).then(|| Gpa(region.gpa.wrapping_add(offset)))
        })
    }
}

fn map(region: Region, file: FileOffset) -> Option<(u64, GuestRegionMmap)> {
    let bytes = usize::try_from(region.bytes).ok().filter(|bytes| *bytes > 0)?;
    let mapping = GuestRegionMmap::from_range(GuestAddress(region.gpa), bytes, Some(file));
    let mapping = mapping.inspect_err(|error| tracing::warn!("a front end's memory: {error}"));
    Some((region.gpa, mapping.ok()?))
}
