//! What all queues of a disk share.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use ebb_sys::panics::Panics;
use ebb_units::FRAME_BYTES;
use ebb_vhost::Dma;

use super::failed;
use crate::block_locks::BlockLocks;
use crate::config::Config;
use crate::counters::Counters;
use crate::image::{Image, outer};
use crate::observer::Observer;
use crate::request::{Halted, ID_BYTES, Limits};

/// What all queues of a disk share.
pub(crate) struct Disk {
    pub(crate) image: Image,
    pub(crate) id: [u8; ID_BYTES],
    pub(crate) dma: Arc<dyn Dma>,
    pub(crate) observer: Arc<dyn Observer>,
    /// Whether all blocks go through buffers of this process.
    pub(crate) wants_content: bool,
    pub(crate) config: Config,
    pub(crate) locks: Arc<BlockLocks>,
    pub(crate) counters: Arc<Counters>,
    /// Panics of the threads that serve the disk.
    pub(crate) panics: Panics,
}

impl Disk {
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            sectors: self.image.bytes() / crate::config::SECTOR_BYTES,
            readonly: self.image.is_readonly(),
        }
    }

    pub(super) fn before_overwrite(&self, bytes: &Range<u64>) -> Result<(), Halted> {
        let bytes = outer(bytes);
        if bytes.is_empty() {
            return Ok(());
        }
        let blocks = bytes.start / FRAME_BYTES..bytes.end / FRAME_BYTES;
        self.observer.before_overwrite(blocks).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => Halted::NotNow,
            _ => failed(&error),
        })
    }
}
