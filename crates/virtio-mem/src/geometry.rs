//! Address, size and blocks of the device's region.

use std::ops::Range;

use ebb_units::{FRAME_BYTES, FrameRange, Gpa};
use thiserror::Error;

/// Most blocks of one device: 32 TiB with blocks of 2 MiB.
pub const BLOCKS_MAX: u64 = 1 << 24;

/// End of guest-physical addresses. No processor has addresses beyond.
const GPA_END: u64 = 1 << 52;

/// A part of guest-physical memory in blocks of one size. It never changes (virtio 1.2, section
/// 5.15.4.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Start of the region: a multiple of the block size. Linux adds memory in its own memory
    /// blocks (128 MiB on x86-64), so a multiple of those serves best.
    pub start: Gpa,
    /// Size of the region, the most that can be plugged: a multiple of the block size.
    pub region_bytes: u64,
    /// Size of a block: a power of two, 4096 or more. 2 MiB lets the host use huge pages.
    pub block_bytes: u64,
    /// The ACPI proximity domain of the memory, offered as `VIRTIO_MEM_F_ACPI_PXM`.
    pub node: Option<u16>,
}

/// Why no device can have a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum GeometryError {
    /// The block size is no power of two, or less than 4 KiB (section 5.15.4.2).
    #[error("a block of {0} bytes: its size must be a power of two, 4096 or more")]
    BlockSize(u64),
    /// The region's start or size is no multiple of the block size (section 5.15.4.2).
    #[error("the region's start and size must be multiples of its blocks of {0} bytes")]
    Alignment(u64),
    /// The region has no block, or too many.
    #[error("a region has 1 to {BLOCKS_MAX} blocks, not {0}")]
    Blocks(u64),
    /// The region ends beyond guest-physical address 2^52.
    #[error("the region ends beyond guest-physical address 2^52")]
    End,
}

impl Geometry {
    /// Checks whether a device can have this region.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), GeometryError> {
        let Geometry { start, region_bytes, block_bytes, .. } = *self;
        if !block_bytes.is_power_of_two() || block_bytes < FRAME_BYTES {
            return Err(GeometryError::BlockSize(block_bytes));
        }
        if !self.is_aligned(start.0) || !self.is_aligned(region_bytes) {
            return Err(GeometryError::Alignment(block_bytes));
        }
        if !(1..=BLOCKS_MAX).contains(&self.blocks()) {
            return Err(GeometryError::Blocks(self.blocks()));
        }
        let end = start.checked_add(region_bytes).ok_or(GeometryError::End)?;
        if end.0 > GPA_END { Err(GeometryError::End) } else { Ok(()) }
    }

    /// Whether an address or a size is a multiple of the block size.
    pub fn is_aligned(&self, bytes: u64) -> bool {
        bytes.is_multiple_of(self.block_bytes)
    }

    /// Returns how many blocks the region has.
    pub fn blocks(&self) -> u64 {
        self.region_bytes / self.block_bytes
    }

    /// Returns the block that contains an address, or `None` if the address is outside the region.
    pub(crate) fn block(&self, gpa: Gpa) -> Option<u64> {
        let offset = gpa.0.checked_sub(self.start.0)?;
        (offset < self.region_bytes).then(|| offset / self.block_bytes)
    }

    /// Returns the `count` blocks from `gpa` on, if they are whole blocks in the first
    /// `usable_bytes` of the region, and at least one.
    pub(crate) fn blocks_at(&self, gpa: Gpa, count: u16, usable_bytes: u64) -> Option<Range<u64>> {
        let first = self.block(gpa).filter(|_| self.is_aligned(gpa.0) && count > 0)?;
        let end = first + u64::from(count);
        (end <= usable_bytes / self.block_bytes).then_some(first..end)
    }

    /// Returns the frames of some blocks.
    pub(crate) fn frames(&self, blocks: &Range<u64>) -> FrameRange {
        let start = Gpa(self.start.0 + blocks.start * self.block_bytes);
        let bytes = (blocks.end - blocks.start) * self.block_bytes;
        FrameRange::new(start.gfn(), bytes / FRAME_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GOOD: Geometry =
        Geometry { start: Gpa(4 << 30), region_bytes: 64 * MIB, block_bytes: 2 * MIB, node: None };

    #[test]
    fn a_region_is_made_of_whole_blocks() {
        let checked = |change: fn(&mut Geometry)| {
            let mut geometry = GOOD;
            change(&mut geometry);
            geometry.check()
        };
        assert_eq!(checked(|_| {}), Ok(()));
        assert_eq!(checked(|g| g.block_bytes = 3 * MIB), Err(GeometryError::BlockSize(3 * MIB)));
        assert_eq!(checked(|g| g.block_bytes = 0), Err(GeometryError::BlockSize(0)));
        assert_eq!(checked(|g| g.block_bytes = 2048), Err(GeometryError::BlockSize(2048)));
        assert_eq!(checked(|g| g.start.0 += MIB), Err(GeometryError::Alignment(2 * MIB)));
        assert_eq!(checked(|g| g.region_bytes += 1), Err(GeometryError::Alignment(2 * MIB)));
        assert_eq!(checked(|g| g.region_bytes = 0), Err(GeometryError::Blocks(0)));
        assert_eq!(checked(|g| g.region_bytes = 1 << 50), Err(GeometryError::Blocks(1 << 29)));
        assert_eq!(checked(|g| g.start = Gpa((1 << 52) - 2 * MIB)), Err(GeometryError::End));
        assert_eq!(checked(|g| g.start = Gpa(0u64.wrapping_sub(2 * MIB))), Err(GeometryError::End));
    }

    #[test]
    fn only_whole_blocks_of_the_usable_region_are_found() {
        let find = |offset: u64, count, usable| {
            GOOD.blocks_at(Gpa(GOOD.start.0.wrapping_add(offset)), count, usable)
        };
        assert_eq!(find(0, 1, 2 * MIB), Some(0..1));
        assert_eq!(find(4 * MIB, 30, 64 * MIB), Some(2..32));
        assert_eq!(find(4 * MIB, 31, 64 * MIB), None);
        assert_eq!(find(2 * MIB, 1, 2 * MIB), None);
        assert_eq!(find(64 * MIB, 1, 64 * MIB), None);
        assert_eq!(find(0, 0, 64 * MIB), None);
        assert_eq!(find(4096, 1, 64 * MIB), None);
        assert_eq!(find(0u64.wrapping_sub(2 * MIB), 1, 64 * MIB), None);
        assert_eq!(GOOD.blocks_at(Gpa(u64::MAX), u16::MAX, u64::MAX), None);
    }
}
