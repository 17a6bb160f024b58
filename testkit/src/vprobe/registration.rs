//! A registration record, as a guest's kernel module writes it.

use super::{PAGE_FREE, PAGE_ORDER};

const STATE_REGISTERED: u64 = 1;
const VERSION: u64 = 1;
/// Bytes before the first range.
const HEADER_BYTES: usize = 200;

/// What a guest registers.
#[derive(Clone, Debug)]
pub struct Registration {
    /// Names the registration.
    pub token: u64,
    /// The record's own address in the guest's kernel.
    pub virtual_address: u64,
    /// Bytes of one frame's page metadata.
    pub page_bytes: u16,
    /// Greatest order of a free block.
    pub max_order: u8,
    /// Code of the helper `page_free`, 64 bytes at most.
    pub page_free: Vec<u8>,
    /// Code of the helper `page_order`, 64 bytes at most.
    pub page_order: Vec<u8>,
    /// Address of the first byte of page metadata and of the byte behind it, first frame described,
    /// and the frame behind the last one.
    pub ranges: Vec<[u64; 4]>,
}

impl Default for Registration {
    /// The helpers of the paper, and no range.
    fn default() -> Registration {
        Registration {
            token: 0x0123_4567_89ab_cdef,
            virtual_address: 0xffff_c900_0001_2000,
            page_bytes: 64,
            max_order: 10,
            page_free: PAGE_FREE.to_vec(),
            page_order: PAGE_ORDER.to_vec(),
            ranges: Vec::new(),
        }
    }
}

impl Registration {
    /// Returns the record's page for the address `at`, sealed.
    pub fn words(&self, at: u64) -> [u64; 512] {
        let length = HEADER_BYTES + 32 * self.ranges.len();
        let [low, high] = self.page_bytes.to_le_bytes();
        let sizes = [0, 0, 0, 0, low, high, self.max_order, self.ranges.len() as u8];
        let lengths = [self.page_free.len() as u8, self.page_order.len() as u8, 0, 0, 0, 0, 0, 0];
        let mut words = [0; 512];
        words[0] = u64::from_le_bytes(*b"EBBVPROB");
        words[1] = VERSION | (length as u64) << 32;
        words[2] = self.token;
        words[3] = at;
        words[4] = self.virtual_address;
        words[5] = STATE_REGISTERED << 32;
        words[7] = u64::from_le_bytes(sizes);
        words[8] = u64::from_le_bytes(lengths);
        put(&mut words[9..17], &self.page_free);
        put(&mut words[17..25], &self.page_order);
        for (into, range) in words[25..].chunks_exact_mut(4).zip(&self.ranges) {
            into.copy_from_slice(range);
        }
        seal(&mut words);
        words
    }
}

fn put(words: &mut [u64], code: &[u8]) {
    for (word, bytes) in words.iter_mut().zip(code.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
}

/// Gives a record the checksum of its content, as far as its length reaches within the page.
pub fn seal(words: &mut [u64; 512]) {
    let used = ((words[1] >> 32) as usize / 8).min(512);
    let mut sealed = *words;
    (sealed[5], sealed[6]) = (0, 0);
    sealed[7] &= !u64::from(u32::MAX);
    let checksum = crc32c(sealed[..used].iter().flat_map(|word| word.to_le_bytes()));
    words[5] = words[5] & !u64::from(u32::MAX) | u64::from(checksum);
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: impl Iterator<Item = u8>) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            let polynomial = if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            crc = crc >> 1 ^ polynomial;
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc_32c() {
        assert_eq!(crc32c(b"123456789".iter().copied()), 0xe306_9283);
    }
}
