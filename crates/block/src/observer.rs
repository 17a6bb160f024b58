//! Who watches what moves between disk and memory.

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

/// Sees what moves between disk and memory. Blocks are of 4 KiB, counted from the
/// image's beginning.
///
/// Called from the queues' threads, which wait for the answer. No other request
/// writes the blocks in question before the call returns, of whatever queue.
pub trait Observer: Send + Sync {
    /// Whether [`Observer::moved`] is to be called. If so, every block goes through
    /// a buffer of ours, as memory that a guest can reach may change while it is
    /// looked at, and then the observer would know a content that neither disk nor
    /// memory has ever had together. Asked once, at the start.
    fn wants_content(&self) -> bool;

    /// These blocks will be overwritten, zeroed or discarded: whatever rests on
    /// them must be elsewhere, and what is known of them forgotten, when this
    /// returns.
    ///
    /// # Errors
    /// It cannot be brought elsewhere: the request fails, the blocks stay. `WouldBlock`: it cannot
    /// now; the request waits, and this is called again.
    fn before_overwrite(&self, blocks: Range<u64>) -> io::Result<()>;

    /// `content` was read from this block and put into this frame, or was taken from
    /// this frame and is on this block now. The guest has been told that its request is
    /// done; the frame may have changed since.
    fn moved(&self, block: u64, gfn: Gfn, content: &Block, direction: Direction);
}

/// Nobody watches.
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
