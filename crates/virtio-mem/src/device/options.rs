//! Settings of a device.

/// Settings of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Whether to offer `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE`. A driver that accepts it does not
    /// even read unplugged memory.
    pub inaccessible: bool,
    /// Whether blocks get all their memory when they are plugged, not at a touch.
    pub prealloc: bool,
    /// Bytes that are usable beyond the requested size, so that the driver can choose blocks. Two
    /// of Linux's memory blocks serve it well.
    pub spare_bytes: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options { inaccessible: true, prealloc: false, spare_bytes: 256 << 20 }
    }
}
