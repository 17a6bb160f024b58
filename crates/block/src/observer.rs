//! What watches the blocks that move between disk and memory.

use std::io;
use std::ops::Range;

use ebb_units::{FRAME_BYTES, Gfn};

/// The content of a block, or of a frame.
pub type Block = [u8; FRAME_BYTES as usize];

/// Which way a block went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the disk into memory.
    Read,
    /// From memory onto the disk.
    Write,
}

/// Sees what moves between disk and memory. A block is 4 KiB, numbered from the image's
/// beginning.
///
/// The queues' threads call it and wait for its answer. No other request, of whatever queue,
/// writes the blocks in question before the call returns.
pub trait Observer: Send + Sync {
    /// Whether to call [`Observer::moved`]. If so, every block goes through a buffer of this
    /// process. Memory that a guest can reach may change while it is read, and then the observer
    /// would know a content that disk and memory have never had together. Asked once, at the
    /// start.
    fn wants_content(&self) -> bool;

    /// Prepares for these blocks to be overwritten, zeroed or discarded. When it returns, no
    /// frame is disk-backed by them, and what was known of them is forgotten.
    ///
    /// # Errors
    /// A frame cannot be refilled: the request fails, and the blocks stay as they are.
    /// `WouldBlock`: it cannot be refilled now. The request waits, and this is called again.
    fn before_overwrite(&self, blocks: Range<u64>) -> io::Result<()>;

    /// Reports that `content` was read from this block and put into this frame, or was taken from
    /// this frame and is on this block now. The guest has been told that its request is done. The
    /// frame may have changed since.
    fn moved(&self, block: u64, gfn: Gfn, content: &Block, direction: Direction);
}

/// An observer that ignores all.
#[derive(Clone, Copy, Default, Debug)]
pub struct Nobody;

impl Observer for Nobody {
    fn wants_content(&self) -> bool {
        false
    }

    fn before_overwrite(&self, _: Range<u64>) -> io::Result<()> {
        Ok(())
    }

    fn moved(&self, _: u64, _: Gfn, _: &Block, _: Direction) {}
}
