//! A chain of descriptors: virtio 1.2, section 2.7. This module walks it, and not the queue's own
//! iterator, because an indirect table is memory that must be pinned.

use ebb_units::Gpa;
use thiserror::Error;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use crate::dma::{DmaFault, Segment};
use crate::guest::Guest;

/// Most descriptors of a queue, and so of a chain.
pub const DESCRIPTORS_MAX: u32 = 1024;
const DESCRIPTOR_BYTES: u32 = 16;

/// The memory of one request. Both lists may be cut into segments in any way.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Chain {
    /// Memory for the device to read.
    pub readable: Vec<Segment>,
    /// Memory for the device to write.
    pub writable: Vec<Segment>,
}

/// Why a chain is not valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Malformed {
    /// A descriptor's index is beyond its table, direct or indirect.
    #[error("a descriptor's number is beyond its table")]
    Index,
    /// The chain has more than [`DESCRIPTORS_MAX`] descriptors, maybe in a circle.
    #[error("a chain has too many descriptors")]
    Length,
    /// An indirect table breaks section 2.7.5.3.
    #[error("an indirect table is inside another, has no whole descriptors, or too many")]
    Indirect,
    /// A descriptor to read follows one to write: section 2.7.4.2.
    #[error("a descriptor to be read stands behind one to be written")]
    Order,
    /// A descriptor is in no memory, or in memory that no device may use.
    #[error("a descriptor is in no memory: {0}")]
    Memory(#[from] DmaFault),
}

struct Descriptor {
    gpa: Gpa,
    bytes: u32,
    flags: u32,
    next: u16,
}

/// Walks the chain that begins at `head` of a table of `size` descriptors, which must be pinned.
/// An indirect table is read as a whole, once: it is pinned once, not once for each descriptor.
/// Virtio 1.2, section 2.7.5.
///
/// # Errors
/// The chain is not valid.
pub fn walk(guest: &Guest, table: Gpa, size: u16, head: u16) -> Result<Chain, Malformed> {
    let (mut index, mut chain) = (u32::from(head), Chain::default());
    let mut indirect: Option<Vec<u8>> = None;
    for _ in 0..=DESCRIPTORS_MAX {
        let descriptor = match &indirect {
            None => read(guest, table, size.into(), index)?,
            Some(copy) => entry(copy, index)?,
        };
        let has = |flag: u32| descriptor.flags & flag != 0;
        let segment = Segment { gpa: descriptor.gpa, bytes: descriptor.bytes };
        if has(VRING_DESC_F_INDIRECT) {
            let count = descriptor.bytes / DESCRIPTOR_BYTES;
            let whole = descriptor.bytes.is_multiple_of(DESCRIPTOR_BYTES);
            if indirect.is_some() || has(VRING_DESC_F_NEXT) || !whole || count > DESCRIPTORS_MAX {
                return Err(Malformed::Indirect);
            }
            let mut copy = vec![0; descriptor.bytes as usize];
            guest.read(vec![segment], &mut copy)?;
            (indirect, index) = (Some(copy), 0);
            continue;
        }
        chain.add(segment, has(VRING_DESC_F_WRITE))?;
        if !has(VRING_DESC_F_NEXT) {
            return Ok(chain);
        }
        index = u32::from(descriptor.next);
    }
    Err(Malformed::Length)
}

/// Reads a descriptor of a table in guest memory.
fn read(guest: &Guest, table: Gpa, size: u32, index: u32) -> Result<Descriptor, Malformed> {
    let offset = u64::from(index) * u64::from(DESCRIPTOR_BYTES);
    let at = table.checked_add(offset).filter(|_| index < size).ok_or(Malformed::Index)?;
    Ok(Descriptor::new(guest.read_array(at)?))
}

/// Returns a descriptor of a table that was read.
fn entry(table: &[u8], index: u32) -> Result<Descriptor, Malformed> {
    let (entries, _) = table.as_chunks::<{ DESCRIPTOR_BYTES as usize }>();
    entries.get(index as usize).map(|bytes| Descriptor::new(*bytes)).ok_or(Malformed::Index)
}

impl Descriptor {
    fn new(bytes: [u8; DESCRIPTOR_BYTES as usize]) -> Descriptor {
        let word = u128::from_le_bytes(bytes);
        Descriptor {
            gpa: Gpa(word as u64),
            bytes: (word >> 64) as u32,
            flags: u32::from((word >> 96) as u16),
            next: (word >> 112) as u16,
        }
    }
}

impl Chain {
    fn add(&mut self, segment: Segment, is_writable: bool) -> Result<(), Malformed> {
        match is_writable {
            _ if segment.bytes == 0 => {}
            true => self.writable.push(segment),
            false if self.writable.is_empty() => self.readable.push(segment),
            false => return Err(Malformed::Order),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::{Access, AllResident, Dma};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    const NEXT: u16 = VRING_DESC_F_NEXT as u16;
    const WRITE: u16 = VRING_DESC_F_WRITE as u16;
    const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

    /// A descriptor: address, bytes, flags, next.
    type Entry = (u64, u32, u16, u16);

    /// Memory that is always resident, and the number of pins.
    #[derive(Default)]
    struct Counting(AtomicU32);

    impl Dma for Counting {
        fn pin(&self, _: &[Segment], _: Access) -> Result<(), DmaFault> {
            self.0.fetch_add(1, Relaxed);
            Ok(())
        }

        fn unpin(&self, _: &[Segment]) {}
    }

    /// Makes a guest with tables at these addresses.
    fn guest(tables: &[(u64, &[Entry])]) -> Guest {
        guest_by(tables, Arc::new(AllResident))
    }

    fn guest_by(tables: &[(u64, &[Entry])], dma: Arc<dyn Dma>) -> Guest {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        for (start, table) in tables {
            for (index, &(gpa, bytes, flags, next)) in (0..).zip(*table) {
                let word = u128::from(gpa)
                    | u128::from(bytes) << 64
                    | u128::from(flags) << 96
                    | u128::from(next) << 112;
                memory.write_obj(word.to_le_bytes(), GuestAddress(start + index * 16)).unwrap();
            }
        }
        Guest::new(Arc::new(memory), dma, Arc::default())
    }

    fn segments(list: &[(u64, u32)]) -> Vec<Segment> {
        list.iter().map(|&(gpa, bytes)| Segment { gpa: Gpa(gpa), bytes }).collect()
    }

    #[test]
    fn a_chain_is_walked_by_its_links() {
        let table =
            [(0x100, 16, NEXT, 2), (0, 0, 0, 0), (0x200, 8, NEXT | WRITE, 3), (0x300, 1, WRITE, 9)];
        let chain = walk(&guest(&[(0x1000, &table)]), Gpa(0x1000), 4, 0).unwrap();
        assert_eq!(chain.readable, segments(&[(0x100, 16)]));
        assert_eq!(chain.writable, segments(&[(0x200, 8), (0x300, 1)]));
    }

    #[test]
    fn an_indirect_table_takes_its_place() {
        let head = [(0x2000, 32, INDIRECT, 0)];
        let table = [(0x100, 16, NEXT, 1), (0x300, 1, WRITE, 0)];
        let guest = guest(&[(0x1000, &head), (0x2000, &table)]);
        let chain = walk(&guest, Gpa(0x1000), 1, 0).unwrap();
        assert_eq!(chain.writable, segments(&[(0x300, 1)]));
    }

    #[test]
    fn an_indirect_table_is_pinned_once() {
        let piece = |next: u16| (0x1000 * u64::from(next), 0x1000, NEXT | WRITE, next);
        let mut table: Vec<Entry> = vec![(0x100, 16, NEXT, 1)];
        table.extend((2..34).map(piece));
        table.push((0x300, 1, WRITE, 0));
        let head = [(0x2000, 16 * table.len() as u32, INDIRECT, 0)];
        let dma = Arc::new(Counting::default());
        let guest = guest_by(&[(0x1000, &head), (0x2000, &table[..])], dma.clone());
        let chain = walk(&guest, Gpa(0x1000), 1, 0).unwrap();
        assert_eq!((chain.readable.len(), chain.writable.len()), (1, 33));
        // One pin is the head's.
        assert_eq!(dma.0.load(Relaxed), 2);
    }

    #[test]
    fn malformed_chains_are_refused() {
        let refused = |table: &[Entry], head| {
            walk(&guest(&[(0x1000, table)]), Gpa(0x1000), table.len() as u16, head).unwrap_err()
        };
        assert_eq!(refused(&[(0, 1, 0, 0)], 1), Malformed::Index);
        assert_eq!(refused(&[(0, 1, NEXT, 7)], 0), Malformed::Index);
        assert_eq!(refused(&[(0, 1, NEXT, 0)], 0), Malformed::Length);
        assert_eq!(refused(&[(0, 1, NEXT | WRITE, 1), (0, 1, 0, 0)], 0), Malformed::Order);
        let indirect = |gpa, bytes, flags| refused(&[(gpa, bytes, flags | INDIRECT, 0)], 0);
        assert_eq!(indirect(0x2000, 17, 0), Malformed::Indirect);
        assert_eq!(indirect(0x2000, 16, NEXT), Malformed::Indirect);
        assert_eq!(indirect(0x2000, 0, 0), Malformed::Index);
        assert_eq!(indirect(0x2000, 16 * 1025, 0), Malformed::Indirect);
        // A table that contains itself.
        assert_eq!(indirect(0x1000, 16, 0), Malformed::Indirect);
        assert!(matches!(indirect(1 << 30, 16, 0), Malformed::Memory(_)));
        assert!(matches!(
            walk(&guest(&[]), Gpa(u64::MAX - 3), 4, 0).unwrap_err(),
            Malformed::Memory(_)
        ));
    }
}
