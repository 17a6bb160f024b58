//! The features and the configuration space of the device: virtio 1.2, sections 5.2.3 and 5.2.4.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use ebb_units::FRAME_BYTES;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// The protocol's unit, whatever the size of the disk's own blocks.
pub const SECTOR_BYTES: u64 = 512;
pub(crate) const SECTORS_PER_BLOCK: u64 = FRAME_BYTES / SECTOR_BYTES;

/// Most data segments of one request: a queue of 128 descriptors (the front ends' default) less
/// header and status.
pub(crate) const SEGMENTS_MAX: u32 = 126;
/// Most ranges in one discard or write-zeroes request.
pub(crate) const RANGES_MAX: u32 = 16;
/// Most sectors in one range to discard: 1 GiB.
pub(crate) const DISCARD_SECTORS_MAX: u32 = (1 << 30) / SECTOR_BYTES as u32;
/// Most sectors in one range to zero: 16 MiB, as zeros may have to be written.
pub(crate) const ZERO_SECTORS_MAX: u32 = (16 << 20) / SECTOR_BYTES as u32;

/// Bytes of `struct virtio_blk_config`, up to the fields for write-zeroes.
const CONFIG_BYTES: usize = 60;
const WRITEBACK_AT: usize = 32;

/// Returns the feature bits that a disk offers.
pub(crate) fn features(readonly: bool) -> u64 {
    let always = [
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_MQ,
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_RING_F_INDIRECT_DESC,
    ];
    let writable = [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
    let more: &[u32] = if readonly { &[VIRTIO_BLK_F_RO] } else { &writable };
    always.iter().chain(more).fold(0, |bits, feature| bits | 1 << feature)
}

/// What was negotiated, and `writeback`, the one field that the driver may write.
pub(crate) struct Config {
    sectors: u64,
    queues: u16,
    features: AtomicU64,
    writeback: AtomicBool,
}

impl Config {
    pub(crate) fn new(sectors: u64, queues: u16, writeback: bool) -> Config {
        Config {
            sectors,
            queues,
            features: AtomicU64::new(0),
            writeback: AtomicBool::new(writeback),
        }
    }

    pub(crate) fn negotiated(&self, features: u64) {
        self.features.store(features, Relaxed);
    }

    /// Whether a write may end before it is on the disk. Section 5.2.6.2: a driver that cannot
    /// flush must not have to.
    pub(crate) fn is_writeback(&self) -> bool {
        let features = self.features.load(Relaxed);
        let has = |feature: u32| features >> feature & 1 == 1;
        has(VIRTIO_BLK_F_FLUSH) && (!has(VIRTIO_BLK_F_CONFIG_WCE) || self.writeback.load(Relaxed))
    }

    /// Returns `size` bytes from `offset` on, zeros where the device has no field.
    pub(crate) fn read(&self, offset: u32, size: u32) -> Vec<u8> {
        let bytes = self.bytes();
        let at = |place: u32| bytes.get(place as usize).copied().unwrap_or(0);
        // A message of the protocol has at most 256 bytes here: section "GET_CONFIG".
        (0..size.min(256)).map(|place| at(offset.saturating_add(place))).collect()
    }

    /// Writes a field for the driver and returns the new value of `writeback`. `None`: the driver
    /// may not write there.
    pub(crate) fn write(&self, offset: u32, bytes: &[u8]) -> Option<bool> {
        match *bytes {
            [value @ (0 | 1)] if offset as usize == WRITEBACK_AT => {
                self.writeback.store(value == 1, Relaxed);
                Some(value == 1)
            }
            _ => None,
        }
    }

    fn bytes(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.sectors.to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        put(20, &(FRAME_BYTES as u32).to_le_bytes());
        // Topology: a physical block is a logical one (exponent 0) and aligned. The best I/O
        // size is one block, with no upper bound.
        put(26, &1u16.to_le_bytes());
        put(WRITEBACK_AT, &[u8::from(self.writeback.load(Relaxed))]);
        put(34, &self.queues.to_le_bytes());
        put(36, &DISCARD_SECTORS_MAX.to_le_bytes());
        put(40, &RANGES_MAX.to_le_bytes());
        put(44, &(SECTORS_PER_BLOCK as u32).to_le_bytes());
        put(48, &ZERO_SECTORS_MAX.to_le_bytes());
        put(52, &RANGES_MAX.to_le_bytes());
        put(56, &[1]); // Zeroing may free space on the disk.
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
    const CONFIG_WCE: u64 = 1 << VIRTIO_BLK_F_CONFIG_WCE;

    #[test]
    fn fields_stand_where_the_specification_has_them() {
        let config = Config::new(8 << 20, 4, true);
        let bytes = config.read(0, 60);
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(config.read(0, 8), (8u64 << 20).to_le_bytes());
        assert_eq!([u32_at(12), u32_at(20), u32_at(44)], [126, 4096, 8]);
        assert_eq!((bytes[32], bytes[34], bytes[56]), (1, 4, 1));
        assert_eq!(config.read(58, 4), [0; 4]);
        assert_eq!(config.read(u32::MAX, 2), [0; 2]);
    }

    #[test]
    fn only_the_cache_mode_can_be_written() {
        let config = Config::new(8, 1, true);
        config.negotiated(FLUSH | CONFIG_WCE);
        assert!(config.is_writeback());
        assert_eq!(config.write(32, &[0]), Some(false));
        assert!(!config.is_writeback());
        assert_eq!(config.read(32, 1), [0]);
        for (offset, bytes) in [(0, &[0u8][..]), (32, &[2]), (32, &[]), (32, &[1, 0]), (33, &[1])] {
            assert_eq!(config.write(offset, bytes), None);
        }
        assert!(!config.is_writeback());
    }

    #[test]
    fn a_driver_that_cannot_flush_has_its_writes_on_disk() {
        let config = Config::new(8, 1, true);
        for (features, writeback) in [(0, false), (FLUSH, true), (CONFIG_WCE, false)] {
            config.negotiated(features);
            assert_eq!(config.is_writeback(), writeback);
        }
    }
}
