//! The device's configuration space and features: virtio 1.2, sections 5.15.3 and 5.15.4.

use crate::geometry::Geometry;

/// `VIRTIO_MEM_F_ACPI_PXM`: `node_id` is valid (section 5.15.3).
pub const F_ACPI_PXM: u64 = 1 << 0;
/// `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE`: the driver does not touch unplugged memory, not even to
/// read it (section 5.15.3).
pub const F_UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;
/// Size of `struct virtio_mem_config` (section 5.15.4).
pub const CONFIG_BYTES: usize = 56;

/// The sizes that change while the device runs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Sizes {
    /// Usable part of the region: blocks may be plugged up to here, in bytes from the region's
    /// start.
    pub usable_bytes: u64,
    /// Size of all plugged blocks, bytes.
    pub plugged_bytes: u64,
    /// Size that the driver should have plugged, bytes.
    pub requested_bytes: u64,
}

/// The configuration space. No thread that has it locked waits for anything.
pub(crate) struct Config {
    geometry: Geometry,
    sizes: Sizes,
    /// Changes with every change of the sizes (section 2.5.1).
    generation: u32,
}

impl Config {
    pub(crate) fn new(geometry: Geometry, sizes: Sizes) -> Config {
        Config { geometry, sizes, generation: 0 }
    }

    pub(crate) fn sizes(&self) -> Sizes {
        self.sizes
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn set(&mut self, sizes: Sizes) {
        if self.sizes != sizes {
            self.sizes = sizes;
            self.generation = self.generation.wrapping_add(1);
        }
    }

    /// Fills `bytes` with the fields from `offset` on, with zeros where there are none.
    pub(crate) fn read(&self, offset: u32, bytes: &mut [u8]) {
        bytes.fill(0);
        let all = self.bytes();
        let part = all.get(offset as usize..).unwrap_or_default();
        bytes.iter_mut().zip(part).for_each(|(to, from)| *to = *from);
    }

    fn bytes(&self) -> [u8; CONFIG_BYTES] {
        let Geometry { start, region_bytes, block_bytes, node } = self.geometry;
        let Sizes { usable_bytes, plugged_bytes, requested_bytes } = self.sizes;
        let node = u64::from(node.unwrap_or(0));
        let fields = [
            block_bytes,
            node,
            start.0,
            region_bytes,
            usable_bytes,
            plugged_bytes,
            requested_bytes,
        ];
        let mut bytes = [0; CONFIG_BYTES];
        for (place, field) in bytes.chunks_exact_mut(8).zip(fields) {
            // `node_id` and its padding are eight bytes, too.
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use ebb_units::Gpa;

    use super::*;

    fn config() -> Config {
        let geometry = Geometry {
            start: Gpa(0x1_4000_0000),
            region_bytes: 0x4_0000_0000,
            block_bytes: 0x20_0000,
            node: Some(0x0102),
        };
        let sizes = Sizes {
            usable_bytes: 0x5000_0000,
            plugged_bytes: 0x2000_0000,
            requested_bytes: 0x4000_0000,
        };
        Config::new(geometry, sizes)
    }

    #[test]
    fn fields_stand_where_the_standard_has_them() {
        let expected = [
            [0, 0, 0x20, 0, 0, 0, 0, 0],
            [2, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0x40, 1, 0, 0, 0],
            [0, 0, 0, 0, 4, 0, 0, 0],
            [0, 0, 0, 0x50, 0, 0, 0, 0],
            [0, 0, 0, 0x20, 0, 0, 0, 0],
            [0, 0, 0, 0x40, 0, 0, 0, 0],
        ]
        .concat();
        let mut bytes = [0xee; CONFIG_BYTES];
        config().read(0, &mut bytes);
        assert_eq!(bytes[..], expected);
    }

    #[test]
    fn it_is_read_at_any_offset_in_any_size() {
        let config = config();
        let whole = [&config.bytes()[..], &[0; 80]].concat();
        for offset in 0..64 {
            for size in [0, 1, 2, 3, 4, 8, 56, 64] {
                let mut bytes = vec![0xee; size];
                config.read(offset, &mut bytes);
                assert_eq!(bytes, whole[offset as usize..][..size], "{offset} {size}");
            }
        }
        let mut bytes = [0xee; 4];
        config.read(u32::MAX, &mut bytes);
        assert_eq!(bytes, [0; 4]);
    }

    #[test]
    fn the_generation_changes_with_what_is_read() {
        let mut config = config();
        config.set(config.sizes());
        assert_eq!(config.generation(), 0);
        config.set(Sizes { plugged_bytes: 0, ..config.sizes() });
        assert_eq!(config.generation(), 1);
    }
}
