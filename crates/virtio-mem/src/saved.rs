//! The device's state as bytes. `docs/virtio-mem.md` draws them.

use ebb_units::Gpa;
use thiserror::Error;
use twox_hash::XxHash3_128;

use crate::block_map::word_count;
use crate::geometry::{BLOCKS_MAX, Geometry, GeometryError};
use crate::request::Named;

const MAGIC: u64 = u64::from_le_bytes(*b"EBBVMEMS");
const VERSION: u64 = 1;
const HEADER_WORDS: usize = 10;
const CHECKSUM_BYTES: usize = 16;
/// Greatest length of a state.
pub(crate) const BYTES_MAX: usize =
    HEADER_WORDS * 8 + (BLOCKS_MAX as usize).div_ceil(8) + CHECKSUM_BYTES;

/// The last change that a request made. Its answer may not have reached the driver, which then asks
/// for the same again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Change {
    /// Whether the change plugged the blocks; otherwise it unplugged them.
    pub(crate) plugs: bool,
    pub(crate) blocks: Named,
}

/// All that a device must know to go on after its process's death.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Saved {
    pub(crate) geometry: Geometry,
    pub(crate) usable_bytes: u64,
    pub(crate) requested_bytes: u64,
    pub(crate) last: Option<Change>,
    /// The plugged blocks: one bit for each block, from the lowest of the first word on.
    pub(crate) words: Vec<u64>,
}

/// Why bytes are no state of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SavedError {
    /// This library did not write them.
    #[error("no state of a virtio-mem device")]
    Foreign,
    /// Another version of this library wrote them.
    #[error("state of a virtio-mem device in version {0}, and not in version {VERSION}")]
    Version(u64),
    /// They were cut off, or changed since.
    #[error("damaged state of a virtio-mem device")]
    Damaged,
}

impl Saved {
    /// Makes the state of a new device: nothing plugged, nothing requested.
    ///
    /// # Errors
    /// No device can have this region.
    pub fn new(geometry: Geometry) -> Result<Saved, GeometryError> {
        geometry.check()?;
        let words = vec![0; word_count(geometry.blocks()) as usize];
        Ok(Saved { geometry, usable_bytes: 0, requested_bytes: 0, last: None, words })
    }

    /// Returns the region of the device.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the size of all plugged blocks, in bytes.
    pub fn plugged_bytes(&self) -> u64 {
        let blocks: u64 = self.words.iter().map(|word| u64::from(word.count_ones())).sum();
        blocks * self.geometry.block_bytes
    }

    /// Returns the state as bytes. `sequence` tells which of two states is the newer.
    pub fn to_bytes(&self, sequence: u64) -> Vec<u8> {
        let Geometry { start, region_bytes, block_bytes, node } = self.geometry;
        let last = self.last.map_or((0, 0, 0), |Change { plugs, blocks }| {
            (if plugs { 1 } else { 2 }, u64::from(blocks.count), blocks.start.0)
        });
        let node = node.map_or(0, |node| u64::from(node) << 32 | 1 << 48);
        let header: [u64; HEADER_WORDS] = [
            MAGIC,
            VERSION,
            sequence,
            block_bytes,
            start.0,
            region_bytes,
            self.usable_bytes,
            self.requested_bytes,
            last.0 | last.1 << 16 | node,
            last.2,
        ];
        // This is up to 2 MiB, before every answer, so one allocation takes all of it.
        let length = (HEADER_WORDS + self.words.len()) * 8 + CHECKSUM_BYTES;
        let mut bytes = Vec::with_capacity(length);
        for word in header.iter().chain(&self.words) {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend(XxHash3_128::oneshot(&bytes).to_le_bytes());
        bytes
    }

    /// Reads what [`Saved::to_bytes`] has written, and returns it with its sequence number. Bytes
    /// after it are ignored.
    ///
    /// # Errors
    /// The bytes are no state, or not a whole one.
    pub fn from_bytes(bytes: &[u8]) -> Result<(Saved, u64), SavedError> {
        let bytes = bytes.get(..bytes.len().min(BYTES_MAX)).unwrap_or(bytes);
        let (words, _) = bytes.as_chunks::<8>();
        let mut words = words.iter().map(|&word| u64::from_le_bytes(word));
        let mut header = [0; HEADER_WORDS];
        for (at, word) in header.iter_mut().zip(&mut words) {
            *at = word;
        }
        let [magic, version, sequence, block_bytes, start, region_bytes, ..] = header;
        match (magic, version) {
            (MAGIC, VERSION) => {}
            (MAGIC, version) => return Err(SavedError::Version(version)),
            _ => return Err(SavedError::Foreign),
        }
        let [.., usable_bytes, requested_bytes, small, change_start] = header;
        let node = (small >> 48 & 1 == 1).then_some((small >> 32) as u16);
        let geometry = Geometry { start: Gpa(start), region_bytes, block_bytes, node };
        geometry.check().map_err(|_| SavedError::Damaged)?;
        let count = word_count(geometry.blocks()) as usize;
        check_sum(bytes, (HEADER_WORDS + count) * 8)?;
        let blocks = Named { start: Gpa(change_start), count: (small >> 16) as u16 };
        let last = match small as u16 {
            0 => None,
            kind @ (1 | 2) => Some(Change { plugs: kind == 1, blocks }),
            _ => return Err(SavedError::Damaged),
        };
        let words = words.take(count).collect();
        let saved = Saved { geometry, usable_bytes, requested_bytes, last, words };
        if saved.makes_sense() { Ok((saved, sequence)) } else { Err(SavedError::Damaged) }
    }

    /// Whether the sizes are valid (section 5.15.4.2), and every plugged block is usable.
    pub(crate) fn makes_sense(&self) -> bool {
        let Geometry { region_bytes, block_bytes, .. } = self.geometry;
        let sizes = [self.requested_bytes, self.usable_bytes, region_bytes];
        let usable_blocks = self.usable_bytes / block_bytes;
        let end = (0..).step_by(64).zip(&self.words).filter(|(_, word)| **word != 0).last();
        let end = end.map_or(0, |(base, word)| base + 64 - u64::from(word.leading_zeros()));
        sizes.is_sorted()
            && sizes.iter().all(|&bytes| self.geometry.is_aligned(bytes))
            && end <= usable_blocks
    }
}

fn check_sum(bytes: &[u8], length: usize) -> Result<(), SavedError> {
    let (body, rest) = bytes.split_at_checked(length).ok_or(SavedError::Damaged)?;
    let sum: &[u8; CHECKSUM_BYTES] = rest.first_chunk().ok_or(SavedError::Damaged)?;
    match XxHash3_128::oneshot(body).to_le_bytes() == *sum {
        true => Ok(()),
        false => Err(SavedError::Damaged),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved() -> Saved {
        let geometry = Geometry {
            start: Gpa(4 << 30),
            region_bytes: 70 << 21,
            block_bytes: 1 << 21,
            node: Some(3),
        };
        let blocks = Named { start: Gpa(5 << 30), count: 9 };
        Saved {
            geometry,
            usable_bytes: 66 << 21,
            requested_bytes: 4 << 21,
            last: Some(Change { plugs: false, blocks }),
            words: vec![0xf, 2],
        }
    }

    #[test]
    fn state_survives_its_bytes() {
        let new = Saved::new(Geometry { node: None, ..saved().geometry }).unwrap();
        for state in [saved(), new] {
            let bytes = state.to_bytes(77);
            assert_eq!(bytes.len(), 80 + 16 + 16);
            assert_eq!(Saved::from_bytes(&bytes), Ok((state.clone(), 77)));
            let padded = [&bytes[..], &[9; 100]].concat();
            assert_eq!(Saved::from_bytes(&padded), Ok((state, 77)));
        }
    }

    #[test]
    fn every_changed_bit_and_every_cut_is_found() {
        let bytes = saved().to_bytes(1);
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(Saved::from_bytes(&changed).is_err(), "bit {bit}");
        }
        for length in 0..bytes.len() {
            assert!(Saved::from_bytes(&bytes[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn state_that_makes_no_sense_is_refused() {
        let refused = |change: fn(&mut Saved)| {
            let mut state = saved();
            change(&mut state);
            assert_eq!(Saved::from_bytes(&state.to_bytes(1)), Err(SavedError::Damaged));
        };
        refused(|state| state.usable_bytes = 65 << 21);
        refused(|state| state.usable_bytes = 71 << 21);
        refused(|state| state.requested_bytes = 67 << 21);
        refused(|state| state.requested_bytes += 4096);
        refused(|state| state.words[1] |= 1 << 6);
    }
}
