//! The driver's side of a split virtqueue (virtio 1.2, section 2.7), in memory of the test.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Where the parts of a queue are, and how many descriptors it has.
#[derive(Clone, Copy, Debug)]
pub struct Rings {
    /// Guest-physical address of the descriptor table.
    pub descriptors: u64,
    /// Guest-physical address of the available ring.
    pub available: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
    /// Number of descriptors: a power of two, 1024 at most.
    pub size: u16,
}

/// A piece of memory in a chain: its address, and its number of bytes.
pub type Piece = (u64, u32);

/// A queue. It takes descriptors in a circle, whether they are still in use or not.
pub struct Queue {
    /// The guest's memory.
    pub memory: GuestMemoryMmap,
    /// The available index: the number of chains that were made available, modulo 2^16.
    pub next: u16,
    rings: Rings,
    descriptor: u16,
}

impl Queue {
    /// Makes an empty queue. The memory at its rings must be zero.
    pub fn new(memory: GuestMemoryMmap, rings: Rings) -> Queue {
        Queue { memory, next: 0, rings, descriptor: 0 }
    }

    /// Where its parts are.
    pub fn rings(&self) -> Rings {
        self.rings
    }

    /// Writes to memory.
    pub fn put(&self, gpa: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(gpa)).unwrap();
    }

    /// Reads from memory.
    pub fn get(&self, gpa: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.memory.read_slice(&mut read, GuestAddress(gpa)).unwrap();
        read
    }

    /// Makes a chain available as it is, and returns its place in the used ring.
    pub fn offer(&mut self, readable: &[Piece], writable: &[Piece]) -> u16 {
        let (head, size) = (self.descriptor, self.rings.size);
        let count = readable.len() + writable.len();
        let flagged =
            readable.iter().map(|piece| (piece, 0)).chain(writable.iter().map(|p| (p, 2)));
        for (index, (&(gpa, bytes), flag)) in flagged.enumerate() {
            let place = (head + index as u16) % size;
            let flags = flag | u128::from(index + 1 < count);
            let next = u128::from((place + 1) % size);
            let word = u128::from(gpa) | u128::from(bytes) << 64 | flags << 96 | next << 112;
            self.put(self.rings.descriptors + 16 * u64::from(place), &word.to_le_bytes());
        }
        self.descriptor = (head + count as u16) % size;
        self.make_available(head)
    }

    /// Makes the chain that begins with descriptor `head` available, and returns its place in the
    /// used ring.
    pub fn make_available(&mut self, head: u16) -> u16 {
        let slot = self.next;
        let entry = self.rings.available + 4 + 2 * u64::from(slot % self.rings.size);
        self.put(entry, &head.to_le_bytes());
        self.next = slot.wrapping_add(1);
        self.put(self.rings.available + 2, &self.next.to_le_bytes());
        slot
    }

    /// Returns the used index.
    pub fn used(&self) -> u16 {
        u16::from_le_bytes(self.get(self.rings.used + 2, 2).try_into().unwrap())
    }

    /// Returns the entry at a place of the used ring: its head, and the number of bytes written.
    pub fn used_at(&self, slot: u16) -> (u32, u32) {
        let entry = self.get(self.rings.used + 4 + 8 * u64::from(slot % self.rings.size), 8);
        let word = u64::from_le_bytes(entry.try_into().unwrap());
        (word as u32, (word >> 32) as u32)
    }
}
